//! Verbs that ask a server: a real one of q4's, and one that says what a test tells it to say.
mod bench;
mod chat;
mod mock;
