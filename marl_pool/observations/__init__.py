"""Conversion of observations of any Gymnasium space to tokens; see `make_view`."""
