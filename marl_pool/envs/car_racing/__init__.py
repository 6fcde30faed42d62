"""CarRacing with screen patches as tokens."""
