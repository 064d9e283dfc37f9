"""The report: a single HTML file about one run, or about several runs side by side. It needs no other file.

    RunSource ──► headline, curves, timeline, samples, mismatches, incidents ─► RunContents ─┐
                  (dataclasses of numbers and texts)                                         ├──► page: one file
    several RunSources ──► comparison ───────────────────────────────────────────────────────┘    of HTML

The browser draws the page with the styles and scripts in pipeline/observe/static, which use no library. They treat all
text of a run as data, never as markup.
"""
