"""`simpar serve`: a local what-if page on plotly Dash."""
