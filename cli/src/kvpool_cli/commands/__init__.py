"""One module for each command; `kvpool_cli/__init__.py` describes what it defines."""
