"""Errors that end a run with exit code 3. Imports nothing, so that every command can import it."""


class StageFailed(RuntimeError):
    """A stage raised, or a node or worker was lost too often."""


class WorkersMissing(StageFailed):
    """A worker that the run needs is missing. It may start on other nodes of the cluster."""


class StoredWrongly(StageFailed):
    """Stored data was found damaged or inconsistent during the run."""
