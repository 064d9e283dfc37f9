"""Confine a process: its files (Landlock), its system calls (seccomp), its view of other processes (namespaces).

System calls are made through ctypes, with the standard library only. The functions that confine apply to the calling
process and its later children, and cannot be undone. They raise OSError if the kernel refuses. The numbers come from
linux/landlock.h and linux/seccomp.h, and from the Linux tables of system calls for x86_64 and aarch64.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READS = 1 << 0 | 1 << 2 | 1 << 3  # execute, read a file, read a folder
_OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15  # the rights that a rule about a file may name
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Version of Landlock -> number of its rights about files. These rights are the lowest bits of a mask. Version 3 added
truncation, version 5 ioctl on devices."""
_BIND_AND_CONNECT_TCP, _ABSTRACT_SOCKETS_AND_SIGNALS = 0b11, 0b11

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET, _CLONE_THREAD = 0x20000000, 0x40000000, 0x00010000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_RDONLY, _MS_REC, _MS_PRIVATE = 2, 4, 8, 1, 1 << 14, 1 << 18

_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_GET_SECCOMP, _PR_SET_SECCOMP = 36, 38, 21, 22
_MODE_FILTER = 2
_AF_UNIX = 1

_MACHINES = {"x86_64": (0xC000003E, 0, 126), "aarch64": (0xC00000B7, 1, 91)}
"""Machine -> (the kernel's constant for it, its column in _CALLS, the number of its system call `capset`)."""
_CALLS = {
    "add_key": (248, 217), "bpf": (321, 280), "chmod": (90, 53), "chown": (92, 54), "clone": (56, 220),
    "clone3": (435, 435), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "fchown": (93, 55),
    "fchownat": (260, 54), "fcntl": (72, 25), "fork": (57, 220), "fremovexattr": (199, 16), "fsetxattr": (190, 7),
    "futimesat": (261, 88), "ioctl": (16, 29), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425), "ioprio_set": (251, 30), "keyctl": (250, 219), "kill": (62, 129),
    "lchown": (94, 54), "lremovexattr": (198, 15), "lsetxattr": (189, 6), "migrate_pages": (256, 238),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "msgctl": (71, 187), "msgget": (68, 186), "msgrcv": (70, 188),
    "msgsnd": (69, 189), "perf_event_open": (298, 241), "pidfd_getfd": (438, 438), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "prlimit64": (302, 261), "process_madvise": (440, 440),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "ptrace": (101, 117),
    "removexattr": (197, 14), "removexattrat": (466, 466), "request_key": (249, 218),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "semctl": (66, 191), "semget": (64, 190), "semop": (65, 193), "setns": (308, 268), "setpriority": (141, 140),
    "setxattr": (188, 5), "setxattrat": (463, 463), "shmat": (30, 196), "shmctl": (31, 195), "shmget": (29, 194),
    "socket": (41, 198), "socketpair": (53, 199), "tgkill": (234, 131), "tkill": (200, 130), "truncate": (76, 45),
    "unshare": (272, 97), "userfaultfd": (323, 282), "utime": (132, 88), "utimensat": (280, 88),
    "utimes": (235, 88), "vfork": (58, 220),
}  # fmt: skip
"""System call -> its numbers on x86_64 and aarch64. If aarch64 lacks an old call, the second number belongs to the call
that replaces it (`clone` replaces `fork` and `vfork`)."""
_NEVER = (
    "add_key", "bpf", "io_uring_enter", "io_uring_register", "io_uring_setup", "keyctl", "perf_event_open",
    "request_key", "setns", "unshare", "userfaultfd",
)  # fmt: skip
"""System calls that are always refused, because they bypass the other filters (io_uring opens sockets) or reach into
the kernel."""
_NOT_FOR_ANSWERS = (
    "chmod", "chown", "fchmod", "fchmodat", "fchmodat2", "fchown", "fchownat", "fremovexattr", "fsetxattr",
    "futimesat", "ioprio_set", "lchown", "lremovexattr", "lsetxattr", "migrate_pages", "mq_open", "mq_unlink",
    "msgctl", "msgget", "msgrcv", "msgsnd", "pidfd_getfd", "pidfd_open", "pidfd_send_signal", "process_madvise",
    "process_vm_readv", "process_vm_writev", "ptrace", "removexattr", "removexattrat", "rt_sigqueueinfo",
    "rt_tgsigqueueinfo", "sched_setattr", "sched_setparam", "sched_setscheduler", "semctl", "semget", "semop",
    "setpriority", "setxattr", "setxattrat", "shmat", "shmctl", "shmget", "socket", "socketpair", "truncate", "utime",
    "utimensat", "utimes",
)  # fmt: skip
"""System calls that are refused to code that evaluates sampled text, in addition to `_NEVER`. Some of them reach other
processes. The others change a file's metadata, which Landlock does not protect."""
_SIGNALS_BY_FILES = {"fcntl": (8, 10, 15), "ioctl": (0x8901, 0x8902)}
"""System call -> its commands that choose a file's signal, or the process that gets the signal: F_SETOWN, F_SETSIG,
F_SETOWN_EX; FIOSETOWN, SIOCSPGRP."""


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _syscall(number: int, *arguments: object) -> int:
    """Make a system call. Integers are passed as longs, everything else as it is."""
    c_arguments = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *c_arguments))


def _prctl(option: int, *arguments: object) -> None:
    c_arguments = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    _checked(_libc.prctl(option, *c_arguments, *[ctypes.c_ulong(0)] * (4 - len(c_arguments))))


def landlock_version() -> int:
    """Return the kernel's version of Landlock, 0 if it has none."""
    try:
        return _syscall(_LANDLOCK_CREATE, None, 0, 1)
    except OSError:
        return 0


def can_filter_calls() -> bool:
    """Return True if system calls can be filtered: their numbers are known for this machine, and the kernel has
    seccomp."""
    try:
        _prctl(_PR_GET_SECCOMP)
    except OSError:
        return False
    return platform.machine() in _MACHINES


def restrict_files(reads: Iterable[str], writes: Iterable[str], *, network: bool) -> None:
    """Forbid access to all files, except reads beneath `reads` and any access beneath `writes`. Landlock 4 and later
    also forbid TCP, unless `network`. Landlock 6 and later also forbid signals to processes outside the sandbox, and
    connections to the abstract sockets of these processes. Paths that do not exist, or that this process may not open,
    are left out."""
    version = landlock_version()
    handled = (1 << _FILE_RIGHTS[min(version, max(_FILE_RIGHTS))]) - 1
    fields = [handled]
    if version >= 4:
        fields.append(0 if network else _BIND_AND_CONNECT_TCP)
    if version >= 6:
        fields.append(_ABSTRACT_SOCKETS_AND_SIGNALS)
    attributes = struct.pack(f"{len(fields)}Q", *fields)
    ruleset = _syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0)
    try:
        for paths, rights in ((reads, _READS), (writes, handled)):
            for path in paths:
                _allow(ruleset, path, rights & handled)
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        _syscall(_LANDLOCK_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not os.path.isdir(path):
                rights &= _OF_FILES
            _syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", rights, opened), 0)
        finally:
            os.close(opened)


def enter_namespaces(*, network: bool) -> None:
    """Give this process its own namespaces of users, mounts and System V objects. If `network` is False, also give it a
    network namespace of its own, without access to the host's network. The user id stays the same, without rights
    outside the namespaces. The process must have a single thread.

    Later children of this process get their own process ids. The first child is process 1: when it ends, all other
    processes of its namespace end.
    """
    user, group = os.getuid(), os.getgid()
    flags = _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWPID | (0 if network else _CLONE_NEWNET)
    _checked(_libc.unshare(flags))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)


def mount_memory(folder: str, *, readonly: bool = False) -> None:
    """Mount an empty in-memory file system over a folder, in this process's namespace."""
    flags = _MS_NOSUID | _MS_NODEV | (_MS_RDONLY if readonly else 0)
    _mount("tmpfs", folder, "tmpfs", flags, "mode=1777")


def mount_processes() -> None:
    """Show only the processes of this namespace under /proc. Call this in process 1 of the namespace."""
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _checked(_libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]))


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def drop_capabilities() -> None:
    """Give up every capability, for programs that are started later too. On machines that are not in `_MACHINES`, only
    keep later programs from gaining new privileges."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if platform.machine() in _MACHINES:
        header, none = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", 0, 0, 0, 0, 0, 0)
        _syscall(_MACHINES[platform.machine()][2], header, none)


def filter_calls(*, network: bool, answers: bool) -> None:
    """Install a filter that refuses system calls with EPERM (`clone3` with ENOSYS).

    - Always refused: calls that bypass other limits (`_NEVER`).
    - Refused if `answers` is True, for code that evaluates sampled text: the calls in `_NOT_FOR_ANSWERS`, which include
      all sockets; new processes; signals to other processes; changes of the limits and processors of other processes.
    - Refused if `answers` is False: new processes with user namespaces of their own.
    - Refused if `answers` and `network` are both False: all sockets except Unix sockets.
    """
    machine, column, _ = _MACHINES[platform.machine()]
    numbers = {call: columns[column] for call, columns in _CALLS.items()}
    refuse = _Filter(machine)
    refuse.call(numbers["clone3"], errno.ENOSYS)  # its flags are behind a pointer; libc then takes `clone`
    for call in (*_NEVER, *(_NOT_FOR_ANSWERS if answers else ())):
        refuse.call(numbers[call])
    if answers:
        refuse.unless_flagged(numbers["clone"], _CLONE_THREAD)
        for call in ("fork", "vfork"):  # on aarch64 these are `clone`, which the filter has handled before
            refuse.call(numbers[call])
        for call in ("kill", "tgkill", "tkill"):
            refuse.unless_first(numbers[call], os.getpid())
        for call, commands in _SIGNALS_BY_FILES.items():
            for command in commands:
                refuse.if_second(numbers[call], command)
        for call in ("prlimit64", "sched_setaffinity"):
            refuse.unless_first(numbers[call], 0)
    else:
        refuse.if_flagged(numbers["clone"], _CLONE_NEWUSER)
        if not network:
            refuse.unless_first(numbers["socket"], _AF_UNIX)
    refuse.install()


class _Filter:
    """A program of the Berkeley Packet Filter that allows or refuses a system call. It reads struct seccomp_data:
    number, machine, instruction pointer, six arguments. Each instruction is (code, jump if true, jump if false,
    value)."""

    _LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
    _ALLOWED, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
    _NUMBER_AT, _MACHINE_AT, _FIRST_ARGUMENT_AT, _SECOND_ARGUMENT_AT = 0, 4, 16, 24
    _X32 = 0x40000000
    """First number of the system calls of x32, a second ABI of x86_64."""

    def __init__(self, machine: int) -> None:
        self._program = [
            (self._LOAD, 0, 0, self._MACHINE_AT),
            (self._EQUAL, 1, 0, machine),
            (self._RETURN, 0, 0, self._KILL),
            (self._LOAD, 0, 0, self._NUMBER_AT),
            (self._AT_LEAST, 0, 1, self._X32),
            (self._RETURN, 0, 0, self._ERROR | errno.ENOSYS),
        ]

    def call(self, number: int, error: int = errno.EPERM) -> None:
        """Refuse the system call `number` with `error`."""
        self._program += [(self._EQUAL, 0, 1, number), (self._RETURN, 0, 0, self._ERROR | error)]

    def unless_first(self, number: int, value: int) -> None:
        """Refuse the system call `number` unless its first argument is `value`."""
        self._look(number, (self._EQUAL, 1, 0, value))

    def unless_flagged(self, number: int, bit: int) -> None:
        """Refuse the system call `number` unless `bit` is set in its first argument."""
        self._look(number, (self._ANY_BIT, 1, 0, bit))

    def if_flagged(self, number: int, bit: int) -> None:
        """Refuse the system call `number` if `bit` is set in its first argument."""
        self._look(number, (self._ANY_BIT, 0, 1, bit))

    def if_second(self, number: int, value: int) -> None:
        """Refuse the system call `number` if its second argument is `value`."""
        refusal = (self._RETURN, 0, 0, self._ERROR | errno.EPERM)
        looked = [(self._LOAD, 0, 0, self._SECOND_ARGUMENT_AT), (self._EQUAL, 0, 1, value), refusal]
        self._program += [(self._EQUAL, 0, 4, number), *looked, (self._LOAD, 0, 0, self._NUMBER_AT)]

    def _look(self, number: int, test: tuple[int, int, int, int]) -> None:
        self._program += [
            (self._EQUAL, 0, 4, number),
            (self._LOAD, 0, 0, self._FIRST_ARGUMENT_AT),
            test,
            (self._RETURN, 0, 0, self._ERROR | errno.EPERM),
            (self._RETURN, 0, 0, self._ALLOWED),
        ]

    def install(self) -> None:
        program = [*self._program, (self._RETURN, 0, 0, self._ALLOWED)]
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
        described = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        _prctl(_PR_SET_SECCOMP, _MODE_FILTER, described)
