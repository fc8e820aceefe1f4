"""The answer to a planning question: candidates, judged, tuned, priced, ranked, explained, drawn.

`answer.py` is the entry; `html.py` writes the report.
"""
