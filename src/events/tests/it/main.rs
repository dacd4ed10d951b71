//! What other engines really sent, and the two ends talking to each other.

mod captures;
