"""What all tests share."""

import signal

# Started in the background of a script, this process inherits "ignore SIGINT" and would hand it on to every server
# and engine it starts; those must meet Ctrl-C as they do in a terminal.
signal.signal(signal.SIGINT, signal.default_int_handler)
