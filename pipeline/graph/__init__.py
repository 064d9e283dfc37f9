"""The graph of a run, and the decisions about what runs next. Pure code: no clock, no I/O, no Dask.

Imports only plain types from `stages` and `storage`."""
