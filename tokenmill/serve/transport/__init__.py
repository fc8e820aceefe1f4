"""Sockets, HTTP framing and everything that happens before a route: limits, TLS, Host, keys, the access log."""
