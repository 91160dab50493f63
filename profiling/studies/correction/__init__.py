"""Models for the study of second passes."""
