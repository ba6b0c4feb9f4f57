"""What the chart in helm/kvtier is generated from: see values.py, chart_files.py and dashboard.py. Not
part of the package."""
