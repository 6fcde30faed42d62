"""A live page in the browser: policies under the hand of a person."""
