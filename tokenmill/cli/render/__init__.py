"""How a result looks: the parts of a screen (screen.py), units (units.py), drawing on a terminal or into a pipe."""
