"""A live page in the browser, on which a person disturbs policies."""
