"""A file system that passes everything on to a directory, and fails or waits as it is told on its standard input.

    python layer.py SOURCE POINT          says "ready", then answers each line with "ok"

A line is `OPERATION ERROR`, `OPERATION ERROR PATH` for that file alone, or `OPERATION delay SECONDS`; operations are
read, write, rename, unlink and fsync. It holds until the next line, which also ends the waiting of those that wait. Run
by `conftest.py`.
"""

from __future__ import annotations

import errno
import os
import sys
import threading

import mfusepy


class Faulty(mfusepy.Operations):
    """The kernel's questions come to the methods of these names; mfusepy calls them in threads of its own."""

    def __init__(self, source):
        self.source = source
        self.fault = ([], threading.Event())  # what goes wrong, and the end of it

    def init(self, path):
        threading.Thread(target=listen, args=(self,), daemon=True).start()

    def _pass(self, operation, path):
        fault, ended = self.fault
        if not fault or fault[0] != operation:
            return
        if fault[1] == "delay":
            ended.wait(float(fault[2]))
        elif path == "".join(fault[2:]) or not fault[2:]:
            raise OSError(getattr(errno, fault[1]), os.strerror(getattr(errno, fault[1])))

    def _at(self, path):
        return self.source + path

    def getattr(self, path, fh=None):
        status = os.lstat(self._at(path))
        times = {name: getattr(status, name + "_ns") for name in ("st_atime", "st_mtime", "st_ctime")}
        names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid")
        return times | {name: getattr(status, name) for name in names}

    def readdir(self, path, fh):
        return [".", "..", *os.listdir(self._at(path))]

    def mkdir(self, path, mode):
        os.mkdir(self._at(path), mode)

    def rename(self, old, new):
        self._pass("rename", old)
        os.rename(self._at(old), self._at(new))

    def unlink(self, path):
        self._pass("unlink", path)
        os.unlink(self._at(path))

    def link(self, target, source):
        os.link(self._at(source), self._at(target))

    def open(self, path, flags):
        return os.open(self._at(path), flags & ~os.O_NOFOLLOW)

    def create(self, path, mode, fi=None):
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def read(self, path, size, offset, fh):
        self._pass("read", path)
        return os.pread(fh, size, offset)

    def write(self, path, data, offset, fh):
        self._pass("write", path)
        return os.pwrite(fh, data, offset)

    def truncate(self, path, length, fh=None):
        os.truncate(self._at(path), length)

    def fsync(self, path, datasync, fh):
        self._pass("fsync", path)
        os.fsync(fh)

    def release(self, path, fh):
        os.close(fh)


def listen(layer):
    print("ready", flush=True)
    for line in sys.stdin:
        _, ended = layer.fault
        layer.fault = (line.split(), threading.Event())
        ended.set()
        print("ok", flush=True)


def main():
    source, point = sys.argv[1:]
    layer = Faulty(source)
    layer.use_ns = True  # times are whole nanoseconds
    # direct_io: the kernel keeps no pages, so every read and write comes here
    mfusepy.FUSE(layer, point, foreground=True, nothreads=False, direct_io=True, attr_timeout=0, entry_timeout=0)


if __name__ == "__main__":
    main()
