"""The report as one HTML file that needs nothing else: written from report.json alone."""
