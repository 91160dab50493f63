"""Training on audio without text: pretraining with BEST-RQ, and a teacher that labels."""
