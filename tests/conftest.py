"""What holds for every test."""

import signal

# A shell ignores Ctrl-C in what it starts in the background, and so would every process below; some tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
