"""Many adapters on one base: registry.py (names and versions), residency.py (slots of the device), host.py (host
memory and disk), build.py (puts them together)."""
