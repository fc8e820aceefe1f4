"""report.html of `optimize`: the saving first, then the evidence, then how to start and repeat it.

Only lays out an outcome; charts and the page around them come from tokenmill/report. Called by outputs.py.
"""

from tokenmill.optimize.report.page import render_report as render_report
