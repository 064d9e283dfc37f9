"""One run, or several side by side, as one HTML file that needs nothing else.

    RunSource ──► headline, curves, timeline, samples, mismatches, incidents ─► RunContents ─┐
                  (one file each: what is gathered, as plain numbers)                        ├──► page: one file
    several RunSources ──► comparison ───────────────────────────────────────────────────────┘    of HTML

The browser draws the page with the styles and scripts in pipeline/observe/static, which use no library. All text of a
run is data for them, never markup.
"""
