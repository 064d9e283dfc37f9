"""Copies of local directories in an object store, for files that other libraries write with their own file calls
(checkpoints, exports).

    local directory ──files, some at once──► object store ──sizes checked──► marker: the copy is complete
    object store ──files, marker last──► local directory

The marker is the directory's manifest, which has the size and CRC-32 of every file. `upload` compares the sizes that
the object store lists with the sizes of the local files. The caller of `download` can compare sizes and checksums with
the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from storage import files
from storage.errors import StoreError


@dataclass(frozen=True)
class Copies:
    """Copies of directories in an object store. The key of a copy is its path below `root`."""

    root: files.Root
    marker: str
    """Name of the file that is uploaded last."""

    def upload(self, directory: Path, key: str) -> None:
        """Upload a directory, unless its copy is already complete. Raises StoreError if a file of the uploaded copy is
        missing or has another size."""
        place, marker = self.root.below(key), (directory / self.marker).read_bytes()
        uploaded = files.sizes(place)
        if uploaded and files.read(place, self.marker) == marker:
            return
        if uploaded:  # by an interrupted upload, or before the version was computed again
            self.remove(key)
        paths = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
        del paths[self.marker]
        files.map_items(place, lambda name: files.upload(place, name, paths[name]), paths)
        fault = self.fault(key, {name: path.stat().st_size for name, path in paths.items()})
        if fault is not None:
            raise StoreError(f"{fault}, after it was uploaded")
        files.write(place, self.marker, marker)

    def download(self, key: str, directory: Path) -> None:
        """Download the files of a complete copy into a local directory, the marker last. Raises StoreError if the copy
        is missing or incomplete."""
        place = self.root.below(key)
        names = files.sizes(place).keys()
        if self.marker not in names:
            raise StoreError(f"{self.root.at(key)}: no complete copy")
        files.map_items(place, lambda name: files.download(place, name, directory / name), names - {self.marker})
        files.download(place, self.marker, directory / self.marker)

    def complete(self, below: str = "") -> Iterator[str]:
        """Yield the keys of all complete copies, sorted. `below`: yield only copies in this directory."""
        for key in files.keys(self.root.below(below) if below else self.root):
            directory, _, name = key.rpartition("/")
            if name == self.marker:
                yield f"{below}/{directory}" if below else directory

    def names(self, below: str) -> list[str]:
        """Return the names of all copies in a directory, including unfinished copies."""
        return files.names(self.root.below(below))

    def manifest(self, key: str) -> bytes | None:
        """Return the content of a copy's marker, or None if the copy is not complete."""
        return files.read(self.root.below(key), self.marker)

    def fault(self, key: str, sizes: Mapping[str, int]) -> str | None:
        """Return a text about the first file that the copy lacks, or has in another size. Return None if there is no
        such file. `sizes`: name of a file -> its size in bytes."""
        place = self.root.below(key)
        uploaded = files.sizes(place)
        for name, size in sizes.items():
            if uploaded.get(name) != size:
                return f"{place.at(name)}: " + (
                    f"has {uploaded[name]} bytes of {size}" if name in uploaded else "is missing"
                )
        return None

    def remove(self, key: str) -> None:
        """Remove a copy, the marker first, so that a half-removed copy is not taken for a complete one."""
        files.remove(self.root.below(key), self.marker)
        files.remove_tree(self.root, key)
