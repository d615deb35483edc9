"""Python imports this module when it starts, because the launcher puts its directory first in PYTHONPATH.

The module removes the directory again, so that the script and its children see the user's path. It loads the
probe, and hands over to the `sitecustomize` of the user or the system. It must run in any Python 3, also
without fleetrun. It therefore uses only the standard library, and nothing newer than Python 3.6.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _leave_search_path():
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _HERE in paths:
        paths.remove(_HERE)
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    else:
        os.environ.pop("PYTHONPATH", None)
    if _HERE in sys.path:
        sys.path.remove(_HERE)


_started = dict(os.environ)
_address = os.environ.pop("FLEETRUN_PROBE_SOCKET", "")
_channel = os.environ.pop("FLEETRUN_ZYGOTE", "")
_watch = _zygote = None
try:
    if _channel:
        import fleetrun_imports

        _watch = fleetrun_imports.Watch()
        if _channel != "note":
            import fleetrun_zygote

            _zygote = fleetrun_zygote.Zygote(int(_channel), _started, _watch)
            _zygote.reads.begin()
    if _address:
        import fleetrun_probe

        fleetrun_probe.install(_address, _watch and _watch.imported)
except Exception as _error:  # the script matters more
    if _channel not in ("", "note"):
        os._exit(1)
    sys.stderr.write(f"fleetrun: no probe in this process: {_error!r}\n")
_leave_search_path()
if _watch is not None:
    _watch.begin(_address)
del sys.modules["sitecustomize"]
if _zygote is not None:
    _zygote.reads.during("sitecustomize")
try:
    import sitecustomize  # noqa: F401 (the next module; if it is missing, Python expects this error)
finally:
    if _zygote is not None:
        _zygote.serve()
