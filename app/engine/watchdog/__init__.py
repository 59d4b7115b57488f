"""Report hangs: the operation that ranks wait in, which ranks are missing, and for how long."""
