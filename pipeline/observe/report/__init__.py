"""A run, or several beside one another, as one HTML file that needs nothing else.

    RunSource ──► headline, curves, timeline, samples, mismatches, troubles ──► RunContents ─┐
                  (one file each: what is gathered, as plain numbers)                        ├──► page: one file
    several RunSources ──► comparison ───────────────────────────────────────────────────────┘    of HTML

Drawing is the browser's: `static/` has its style and scripts, by hand, without a library. Whatever a run says is data
for them, never markup.
"""
