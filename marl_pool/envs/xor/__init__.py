"""The XOR game: agents that are alike have to act differently."""
