"""What the chart in helm/kvtier is generated from: see values.py and chart_files.py. Not part of the
package."""
