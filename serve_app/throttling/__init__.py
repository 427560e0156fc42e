"""What comes before admission is refused, charged or taken in turns here."""
