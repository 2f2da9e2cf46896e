"""Shows a comparison: in the terminal, as JSON, Markdown or CSV, or as one page of HTML."""
