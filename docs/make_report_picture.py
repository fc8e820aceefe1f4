"""Makes docs/images/plan_report.png: the HTML report of a plan as a browser shows it.

    python docs/make_report_picture.py [BROWSER]

Needs an installed tokenmill and a Chromium (default: chromium on the path). The report itself loads nothing.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

PICTURE = Path(__file__).parent / "images" / "plan_report.png"
PLAN = "plan llama-3.1-70b --gpu h100x4 --concurrency 32 --max-quality-loss 1 --speculation off"
SIZE = "1180,1180"


def main() -> None:
    browser = sys.argv[1] if len(sys.argv) > 1 else "chromium"
    PICTURE.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "plan.html"
        subprocess.run([sys.executable, "-m", "tokenmill", *PLAN.split(), "--html", str(report)], check=True)
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={SIZE}"]
        subprocess.run([browser, *flags, f"--screenshot={PICTURE}", report.as_uri()], check=True)
    print(PICTURE)


if __name__ == "__main__":
    main()
