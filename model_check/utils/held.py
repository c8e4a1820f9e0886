"""Directories held by their descriptor, for places where other users may write, too.

A user who may write to a directory may rename, replace or link any name in it at any moment: a path
that was checked may lead elsewhere when it is used. Here a name is one component, looked up in a
directory that is held. A link is followed only where no other user can have made it. Only plain
files are opened: a pipe would block, and a hard link may be a file elsewhere. Every method raises
OSError.
"""

import errno
import os
import pwd
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, BufferedWriter
from pathlib import Path

_DIRECTORY = os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
OTHERS_WRITE = 0o022
_DEEPEST = 10_000
"""Levels of directories that are removed. Ours are two deep."""


class NotPlainError(OSError):
    """A name leads to a link, a pipe, or something else that is not opened here."""


class HeldDirectory:
    """A directory that stays the same one, whatever becomes of its name."""

    def __init__(self, descriptor: int, path: Path) -> None:
        """Owns the descriptor. `path` is for messages."""
        self.descriptor = descriptor
        self.path = path

    def __repr__(self) -> str:
        return f"<HeldDirectory {self.path}>"

    def __enter__(self) -> "HeldDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    # Directories

    def directory(self, *names: str) -> "HeldDirectory":
        """A directory below. Raises NotPlainError for a link that another user may have made."""
        held = HeldDirectory(os.dup(self.descriptor), self.path)
        for name in names:
            with held as parent:
                held = HeldDirectory(parent._open_directory(name), parent.path / name)
        return held

    def directory_or_own_link(self, name: str) -> "HeldDirectory":
        """Like `directory`, in a directory of the user's own choice. It follows a link that we or
        root made, or, if no other user may write to the directory, its owner."""
        return HeldDirectory(self._open_directory(name, own=True), self.path / name)

    def make_directory(self, name: str, mode: int = 0o777) -> None:
        """Raises FileExistsError if anything has that name."""
        os.mkdir(_component(name), mode, dir_fd=self.descriptor)

    def _open_directory(self, name: str, *, own: bool = False) -> int:
        try:
            return self._open_no_link(name)
        except NotPlainError:
            target = self._target(name, own=own)
            if target is None:
                raise
        with self._naming_link(name, target):
            return _open_directory(target, 0, self.descriptor)

    def _open_no_link(self, name: str) -> int:
        try:
            return _open_directory(_component(name), os.O_NOFOLLOW, self.descriptor)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise self._refused(name, "is no directory", error) from error
            raise

    # Links

    def _target(self, name: str, *, own: bool = False) -> str | None:
        """The target of a link that may be followed; None for other links and for what is not a
        link."""
        link = os.open(_component(name), os.O_PATH | os.O_NOFOLLOW, dir_fd=self.descriptor)
        try:
            status = os.fstat(link)
            followed = stat.S_ISLNK(status.st_mode) and self._is_followed(status, own)
            return os.readlink("", dir_fd=link) if followed else None
        finally:
            os.close(link)

    def _is_followed(self, link: os.stat_result, own: bool) -> bool:
        """`own`: as under the kernel's fs.protected_symlinks. Elsewhere the link's owner is not
        enough: others can move a link of ours, or make a directory with links of their own."""
        here, ours = self.status(), (0, os.geteuid())
        private = not here.st_mode & OTHERS_WRITE
        if own:
            return link.st_uid in ours or (private and link.st_uid == here.st_uid)
        return private and link.st_uid in ours and here.st_uid in ours

    @contextmanager
    def _naming_link(self, name: str, target: str) -> Iterator[None]:
        """An error of the link's target names the link, and does not look like an absent entry."""
        try:
            yield
        except OSError as error:
            problem = f"the link {self.path / name} leads to {target}: {error.strerror}"
            raise OSError(errno.ENOLINK, problem) from error

    def _refused(self, name: str, problem: str, error: OSError | None = None) -> NotPlainError:
        with suppress(OSError):
            if stat.S_ISLNK(self.lstat(name).st_mode):
                problem += f" ({self.path / name} is a link that another user may have made)"
        return _not_plain(problem, error)

    # Looking

    def status(self) -> os.stat_result:
        return os.fstat(self.descriptor)

    def names(self) -> list[str]:
        listed = os.open(".", os.O_RDONLY | _DIRECTORY, dir_fd=self.descriptor)
        try:
            return sorted(os.listdir(listed))
        finally:
            os.close(listed)

    def lstat(self, name: str) -> os.stat_result:
        """Of anything that has that name."""
        return os.stat(_component(name), dir_fd=self.descriptor, follow_symlinks=False)

    def plain(self, name: str) -> os.stat_result:
        """Of a plain file."""
        status = self.lstat(name)
        if stat.S_ISLNK(status.st_mode) and (target := self._target(name)) is not None:
            with self._naming_link(name, target):
                return _plain(os.stat(target, dir_fd=self.descriptor))
        return self._checked(name, status)

    def has(self, name: str) -> bool:
        """Whether there is a plain file of that name."""
        with suppress(OSError):
            self.plain(name)
            return True
        return False

    def is_ours(self) -> bool:
        """Asks the file system which user we are: NFS maps root to nobody, and some file systems
        know one owner only."""
        owner = self.status().st_uid
        return owner == os.geteuid() or owner == self.owner_of_new_file()

    def owner_of_new_file(self) -> int:
        """Makes a file and removes it."""
        name = f".owner-{os.urandom(8).hex()}"
        with self.create_first(name) as file:
            self.unlink(name)
            return os.fstat(file.fileno()).st_uid

    def owners(self) -> set[int]:
        """The users to whom this directory and what is in it belong."""
        return {self.status().st_uid, *(self.lstat(name).st_uid for name in self.names())}

    def leads_to(self, name: str, status: os.stat_result) -> bool:
        """Whether a name still leads to the same file or directory."""
        with suppress(FileNotFoundError):
            return os.path.samestat(self.lstat(name), status)
        return False

    # Files

    def open(self, name: str, flags: int = 0) -> BufferedReader:
        """A plain file, to read."""
        return os.fdopen(self._open_plain(name, os.O_RDONLY | flags), "rb")

    def append(self, name: str) -> BufferedWriter:
        """A plain file, to write behind its end."""
        return os.fdopen(self._open_plain(name, os.O_WRONLY | os.O_APPEND), "ab")

    def append_or_create(self, name: str) -> BufferedWriter:
        """`append`, or a new file where nothing has that name."""
        try:
            return self.create_first(name)
        except FileExistsError:
            return self.append(name)

    def create(self, name: str) -> BufferedWriter:
        """A new file, to write. Anything that had its name is unlinked."""
        with suppress(FileNotFoundError):
            self.unlink(name)
        return self.create_first(name)

    def create_first(self, name: str) -> BufferedWriter:
        """A new file, to write. Raises FileExistsError if anything has that name."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
        return os.fdopen(os.open(_component(name), flags, 0o666, dir_fd=self.descriptor), "wb")

    def read(self, name: str, limit: int, flags: int = 0) -> bytes:
        """A plain file of at most `limit` bytes."""
        with self.open(name, flags) as file:
            return _read(file, os.fstat(file.fileno()).st_size, limit)

    def read_own(self, name: str, limit: int) -> bytes:
        """Like `read`, of a file that no other user made: root's, or ours."""
        with self.open(name) as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in (0, os.geteuid()):
                raise PermissionError(errno.EPERM, "it belongs to another user")
            return _read(file, status.st_size, limit)

    def replace(self, name: str, content: bytes) -> None:
        """See `replacing`."""
        with self.replacing(name) as file:
            file.write(content)

    @contextmanager
    def replacing(
        self, name: str, before: Callable[[], object] | None = None
    ) -> Iterator[BufferedWriter]:
        """A new file to write to, which takes the name when it is whole and synced: a reader sees
        the old content or the new, never a part. Nothing is left of it after an error. `before`:
        called when it is whole, just before it takes the name."""
        temporary = f".{name}.{os.urandom(8).hex()}.tmp"
        try:
            with self.create_first(temporary) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if before is not None:
                before()
            self.rename(temporary, self, name)
            self.sync()
        except BaseException:
            with suppress(OSError):
                self.unlink(temporary)
            raise

    def _open_plain(self, name: str, flags: int) -> int:
        try:
            descriptor = os.open(_component(name), flags | _FILE, dir_fd=self.descriptor)
        except OSError as error:
            to_read = error.errno == errno.ELOOP and not flags & os.O_WRONLY
            if to_read and (target := self._target(name)) is not None:
                return self._open_linked(name, target, flags)
            # ENXIO: a socket, or a pipe opened for writing.
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise self._refused(name, "is no plain file", error) from error
            raise
        with _closed_on_error(descriptor):
            self._checked(name, os.fstat(descriptor))
        return descriptor

    def _open_linked(self, name: str, target: str, flags: int) -> int:
        with self._naming_link(name, target):
            descriptor = os.open(target, flags | _FILE & ~os.O_NOFOLLOW, dir_fd=self.descriptor)
            with _closed_on_error(descriptor):
                _plain(os.fstat(descriptor))
            return descriptor

    def _checked(self, name: str, status: os.stat_result) -> os.stat_result:
        if stat.S_ISLNK(status.st_mode):
            raise self._refused(name, "is no plain file")
        if _plain(status).st_nlink > 1 and self._may_be_planted(status):
            raise _not_plain("is a hard link, which another user may have made")
        return status

    def _may_be_planted(self, status: os.stat_result) -> bool:
        """Where the kernel lets everybody link everything (fs.protected_hardlinks=0)."""
        directory = self.status()
        return bool(directory.st_mode & OTHERS_WRITE) or directory.st_uid != status.st_uid

    # Changing

    def unlink(self, name: str) -> None:
        os.unlink(_component(name), dir_fd=self.descriptor)

    def rename(self, name: str, to: "HeldDirectory", new: str) -> None:
        """Of a link, the link itself."""
        names = _component(name), _component(new)
        os.rename(*names, src_dir_fd=self.descriptor, dst_dir_fd=to.descriptor)

    def link(self, name: str, new: str) -> None:
        """A second name for a file here; of a link, for the link itself."""
        here = self.descriptor
        names = _component(name), _component(new)
        os.link(*names, src_dir_fd=here, dst_dir_fd=here, follow_symlinks=False)

    def sync(self) -> None:
        os.fsync(self.descriptor)

    def remove(self, name: str) -> None:
        """Remove anything that has that name, and all that is in it. Of a link, the link itself."""
        if (held := self._directory_or_unlinked(name)) is not None:
            with held:
                self.remove_held(held)

    def remove_held(self, held: "HeldDirectory") -> None:
        """Remove a directory of this one with all that is in it, if its name still leads to it."""
        if self.leads_to(held.path.name, held.status()):
            held.clear()
            os.rmdir(held.path.name, dir_fd=self.descriptor)

    def clear(self) -> None:
        """Remove all that is in this directory, level by level, not by recursion: another user may
        have nested directories a thousand deep."""
        for _ in range(_DEEPEST):
            names = self.names()
            if not names:
                return
            for name in names:
                # Another process may remove it at the same time.
                with suppress(FileNotFoundError):
                    self._flatten(name)
        raise OSError(errno.EINVAL, f"directories in directories, more than {_DEEPEST:,} deep")

    def _flatten(self, name: str) -> None:
        """Remove a file, or a directory after its own directories were moved into this one."""
        held = self._directory_or_unlinked(name)
        if held is None:
            return
        with held:
            for inner in held.names():
                if stat.S_ISDIR(held.lstat(inner).st_mode):
                    held.rename(inner, self, os.urandom(16).hex())
                else:
                    held.unlink(inner)
            os.rmdir(name, dir_fd=self.descriptor)

    def _directory_or_unlinked(self, name: str) -> "HeldDirectory | None":
        """None: it was not a directory, and is unlinked."""
        try:
            return HeldDirectory(self._open_no_link(name), self.path / name)
        except NotPlainError:
            self.unlink(name)
        return None


def user_name(uid: int) -> str:
    """`alice (uid 1001)`."""
    with suppress(KeyError):  # a container may not know the user
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    return f"uid {uid}"


def hold(path: Path) -> HeldDirectory:
    """A directory at a path of the user's own choice. Links in the path are followed once, here."""
    return HeldDirectory(_open_directory(str(path), 0, None), path)


def hold_unlinked(path: Path, *, make: bool = False) -> HeldDirectory:
    """Like `hold`; but in each directory on the way where others may write, a link is followed
    only if we or root made it. `make`: directories that are absent are made. Raises NotPlainError
    for another link."""
    path = Path(os.path.normpath(path))
    if path.parts[:1] == ("..",):
        path = Path(os.path.abspath(path))
    held = hold(Path(path.anchor or "."))
    for name in path.parts[1:] if path.anchor else path.parts:
        with held as parent:
            try:
                held = _next(parent, name)
            except FileNotFoundError:
                if not make:
                    raise
                with suppress(FileExistsError):
                    parent.make_directory(name)
                held = _next(parent, name)
    return held


def refuse_planted(path: Path) -> None:
    """Raises NotPlainError for a link on the way that the kernel would not follow either, where
    fs.protected_symlinks is set: another user's, in a sticky directory where all may write."""
    path = Path(os.path.abspath(path))
    for place in (*reversed(path.parents), path):
        try:
            link, around = place.lstat(), os.stat(place.parent)
        except OSError:  # it is not there, or not for us to see
            continue
        is_shared = around.st_mode & stat.S_ISVTX and around.st_mode & OTHERS_WRITE
        is_own = link.st_uid in (os.geteuid(), around.st_uid)
        if stat.S_ISLNK(link.st_mode) and is_shared and not is_own:
            raise _not_plain(f"{place} is a link that another user may have made")


def make_unlinked(path: Path, mode: int = 0o777) -> None:
    """Make a directory, unless it is there, and those that it lies in. A link, also in its own
    place, is followed as by `hold_unlinked`: nothing is made where another user's leads."""
    path = Path(os.path.normpath(path))
    if path.name in ("", ".."):  # the root, or where we are
        return
    try:
        with hold_unlinked(path.parent, make=True) as parent:
            try:
                parent.make_directory(path.name, mode)
            except OSError:  # NFS may refuse before it looks whether it is there
                if not os.path.lexists(path):
                    raise
            _next(parent, path.name).close()
    except OSError as error:
        if error.filename is not None:
            error.filename = str(path)
        raise


def _next(parent: HeldDirectory, name: str) -> HeldDirectory:
    try:
        return parent.directory_or_own_link(name)
    except NotPlainError as error:
        if stat.S_ISLNK(parent.lstat(name).st_mode):
            raise
        raise NotADirectoryError(
            errno.ENOTDIR, "Not a directory", str(parent.path / name)
        ) from error


def hold_own(path: Path) -> HeldDirectory:
    """Like `hold_unlinked`; and where others may write around it, it is ours or root's. Raises
    NotPlainError."""
    held = hold_unlinked(path)
    with _closed_on_error(held.descriptor):
        around = os.stat("..", dir_fd=held.descriptor).st_mode
        if around & OTHERS_WRITE and held.status().st_uid != 0 and not held.is_ours():
            raise _not_plain("belongs to another user, in a place where others may have made it")
    return held


def _read(file: BufferedReader, size: int, limit: int) -> bytes:
    if size > limit:
        raise NotPlainError(errno.EFBIG, f"is larger than {limit:,} bytes")
    return file.read(size)


def _open_directory(path: str, flags: int, directory: int | None) -> int:
    try:
        return os.open(path, os.O_RDONLY | flags | _DIRECTORY, dir_fd=directory)
    # It may be passed through, but not listed.
    except PermissionError:
        return os.open(path, os.O_PATH | flags | _DIRECTORY, dir_fd=directory)


@contextmanager
def _closed_on_error(descriptor: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(descriptor)
        raise


def _plain(status: os.stat_result) -> os.stat_result:
    if stat.S_ISDIR(status.st_mode):
        raise NotPlainError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise _not_plain("is no plain file")
    return status


def _component(name: str) -> str:
    """Manifests of other users name files, and may name `../../x`."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise _not_plain("is no name of a file here")
    return name


def _not_plain(problem: str, error: OSError | None = None) -> NotPlainError:
    return NotPlainError(error.errno if error else errno.EINVAL, problem)
