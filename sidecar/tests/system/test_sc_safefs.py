"""Files are opened beneath a directory or not at all."""

from __future__ import annotations

import os

import pytest

from kvpool_sidecar.system import safe_open as safefs
from kvpool_sidecar.system import unix_socket as unixsock


@pytest.fixture(params=["openat2", "steps"])
def open_beneath(request):
    if request.param == "openat2":
        if not safefs.has_openat2():
            pytest.skip("this kernel has no openat2")
        return safefs.open_by_openat2
    return safefs.open_by_steps


@pytest.fixture
def inside(tmp_path):
    (tmp_path / "in" / "a").mkdir(parents=True)
    (tmp_path / "in" / "a" / "f").write_text("inside")
    (tmp_path / "secret").write_text("outside")
    fd = os.open(tmp_path / "in", os.O_RDONLY | os.O_DIRECTORY)
    yield fd, tmp_path
    os.close(fd)


def test_a_file_inside_is_opened(open_beneath, inside):
    fd, _ = inside
    found = open_beneath(fd, "a/f", os.O_RDONLY)
    assert os.read(found, 10) == b"inside"
    assert not os.get_inheritable(found)
    os.close(found)
    os.close(open_beneath(fd, ".", os.O_RDONLY | os.O_DIRECTORY))


def test_a_file_is_made_with_the_mode_that_was_asked_for(open_beneath, inside):
    fd, path = inside
    before = os.umask(0)
    os.close(open_beneath(fd, "a/new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640))
    os.umask(before)
    assert (path / "in/a/new").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("way", ["../secret", "a/../../secret", "{path}/secret"])
def test_there_is_no_way_out(open_beneath, inside, way):
    fd, path = inside
    with pytest.raises(OSError, match="cross-device"):
        open_beneath(fd, way.format(path=path), os.O_RDONLY)


@pytest.mark.parametrize("target", ["../secret", "{path}/secret", "a/f", "/proc/self/root{path}/secret"])
@pytest.mark.parametrize("where", ["link", "d"])
def test_no_link_is_followed_wherever_it_is(open_beneath, inside, target, where):
    fd, path = inside
    target = target.format(path=path)
    if where == "link":
        (path / "in/link").symlink_to(target)
        wanted = "link"
    else:
        (path / "in/d").symlink_to(os.path.dirname(target) or ".")
        wanted = "d/" + os.path.basename(target)
    with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
        open_beneath(fd, wanted, os.O_RDONLY)


def test_a_tree_goes_and_what_links_point_to_stays(inside):
    fd, path = inside
    (path / "in/a/b").mkdir()
    (path / "in/a/b/out").symlink_to(path)
    (path / "in/a/b/file").symlink_to(path / "secret")
    assert safefs.remove_tree(fd, "a") == 3
    assert os.listdir(path / "in") == []
    assert (path / "secret").read_text() == "outside"
    assert safefs.remove_tree(fd, "a") == 0


def test_a_tree_that_is_a_link_is_removed_as_a_link(inside):
    fd, path = inside
    (path / "in/l").symlink_to(path)
    assert safefs.remove_tree(fd, "l") == 1
    assert (path / "secret").exists()


def test_directories_are_not_made_through_a_link(inside):
    fd, path = inside
    (path / "in/l").symlink_to(path)
    with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
        safefs.make_directories(fd, "l/new")
    assert not (path / "new").exists()
    safefs.make_directories(fd, "x/y")
    safefs.make_directories(fd, "x/y")
    assert (path / "in/x/y").is_dir()


@pytest.mark.parametrize("there", ["nothing", "file", "link", "dangling", "socket", "fifo", "directory", "full"])
def test_a_socket_takes_the_place_of_whatever_is_there(inside, there):
    fd, path = inside
    name = path / "in" / "kv.sock"
    if there == "file":
        name.write_text("x")
    elif there == "link":
        name.symlink_to(path / "secret")
    elif there == "dangling":
        name.symlink_to(path / "nowhere")
    elif there == "socket":
        unixsock.listen_at(fd, "kv.sock", 0o600).close()
    elif there == "fifo":
        os.mkfifo(name)
    elif there in ("directory", "full"):
        name.mkdir()
        if there == "full":
            (name / "x").write_text("x")
    listener = unixsock.listen_at(fd, "kv.sock", 0o666)
    assert name.is_socket()
    assert name.stat().st_mode & 0o777 == 0o666
    assert (path / "secret").read_text() == "outside"
    assert not (path / "nowhere").exists()
    listener.close()


def test_a_socket_at_a_path_longer_than_an_address_holds(tmp_path):
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    fd = os.open(deep, os.O_RDONLY | os.O_DIRECTORY)
    unixsock.listen_at(fd, "kv.sock", 0o600).close()
    os.close(fd)
    assert os.listdir(deep) == ["kv.sock"]
