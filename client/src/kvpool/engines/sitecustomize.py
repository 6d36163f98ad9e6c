"""Start-up module of Python (`sitecustomize`) in the directory that injection puts on PYTHONPATH.

Installs the import hooks of `kvpool.engines.startup` where a variable configures one, and runs the `sitecustomize` that
this file hides. Every Python process of the container runs it, of any version: it imports nothing without a variable.
"""

import os
import sys


def _install():
    # type: () -> None
    if sys.version_info < (3, 10):
        return
    if os.environ.get("KVPOOL_SGLANG_HICACHE") or os.environ.get("KVPOOL_LMCACHE_L2"):
        try:
            from kvpool.engines import startup

            startup.install()
        except Exception as e:  # the process must start, whatever is wrong here
            sys.stderr.write("kvpool: the import hook was not installed: %r\n" % (e,))


def _run_hidden():
    # type: () -> None
    """Import the next `sitecustomize` of the path. What it raises is raised, as if it were the only one."""
    here = os.path.dirname(os.path.abspath(__file__))
    places = [n for n, entry in enumerate(sys.path) if os.path.abspath(entry or ".") == here]
    this = sys.modules.get(__name__)
    if not places or this is None or __name__ != "sitecustomize":
        return
    entry = sys.path[places[0]]
    sys.path[:] = [kept for n, kept in enumerate(sys.path) if n not in places]
    del sys.modules[__name__]
    try:
        __import__(__name__)
    except ImportError as e:
        if getattr(e, "name", __name__) != __name__:
            raise
    finally:
        sys.path.insert(min(places[0], len(sys.path)), entry)
        sys.modules.setdefault(__name__, this)


_install()
_run_hidden()
