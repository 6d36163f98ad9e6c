"""What all tests share: how hypothesis judges a busy machine, which is not at all, and a Ctrl-C that ends processes."""

import signal
import threading

from hypothesis import HealthCheck, settings

settings.register_profile("kvpool", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvpool")

# in the background of a shell SIGINT is ignored, which every process that a test starts would inherit
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
