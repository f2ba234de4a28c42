//! Running ahead: the step behind a chosen token starts before anyone asks for it, because the device has all
//! it needs.
//!
//! Nothing of it counts until it is asked for. What it wrote behind the cache's length is written again by
//! the next step there, and a step that nobody asks for is forgotten: ids and positions of the next one are
//! placed anew.
use super::outbox::{Choice, Ticket};

/// Where the device stands behind the last step that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stands {
    /// Somewhere: the next step's id and position are to be placed.
    Elsewhere,
    /// Before the next step: the chosen token is embedded, and its position is the next one.
    Ready,
    /// In the step of the chosen token or behind it.
    Ahead,
}

/// What a step that is asked for needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// Id and position, then a launch.
    Placed,
    /// A launch.
    Fed,
    /// Nothing: it runs.
    Running,
}

/// The last step that was asked for, and what is known of its choice.
pub(super) struct Course {
    stands: Stands,
    ticket: Option<Ticket>,
    choice: Option<Choice>,
}

impl Course {
    /// Before the first step.
    pub fn new() -> Self {
        Self { stands: Stands::Elsewhere, ticket: None, choice: None }
    }

    /// What a step of one token `id` at the next position needs.
    pub fn start(&self, id: u32) -> Start {
        match (self.stands, self.choice) {
            (Stands::Ahead, Some(c)) if c.token == id => Start::Running,
            (Stands::Ready, Some(c)) if c.token == id => Start::Fed,
            _ => Start::Placed,
        }
    }
    /// A step was asked for and is enqueued; `ticket` is of the token it chooses, if it does.
    pub fn asked(&mut self, ticket: Option<Ticket>) {
        self.stands = if ticket.is_some() { Stands::Ready } else { Stands::Elsewhere };
        (self.ticket, self.choice) = (ticket, None);
    }
    /// Another token of the same logits was chosen, and is the next step's id.
    pub fn redrawn(&mut self, ticket: Ticket) {
        (self.ticket, self.choice) = (Some(ticket), None);
    }
    /// The next step was launched.
    pub fn ran_ahead(&mut self) {
        self.stands = Stands::Ahead;
    }
    /// The next step will not be the one the device is set for. Returns whether that one runs.
    pub fn leave(&mut self) -> bool {
        let ran = self.stands == Stands::Ahead;
        self.stands = Stands::Elsewhere;
        ran
    }
    /// A step is about to be enqueued: until it is, nothing is known.
    pub fn forget(&mut self) {
        *self = Self::new();
    }

    pub fn stands(&self) -> Stands {
        self.stands
    }
    /// The record to wait for, or what it said.
    pub fn choice(&self) -> Option<Result<Choice, Ticket>> {
        self.choice.map(Ok).or(self.ticket.map(Err))
    }
    /// What the record said.
    pub fn knows(&mut self, choice: Choice) {
        self.choice = Some(choice);
    }
}

#[cfg(test)]
mod tests {
    use super::super::outbox;
    use super::*;

    fn after(id: u32) -> Course {
        let mut course = Course::new();
        course.asked(Some(outbox::ticket(1)));
        course.knows(Choice { token: id, finite: true });
        course
    }

    #[test]
    fn a_step_that_ran_ahead_is_taken_by_its_token_alone() {
        let mut course = after(7);
        assert_eq!((course.start(7), course.start(8)), (Start::Fed, Start::Placed));
        course.ran_ahead();
        assert_eq!((course.start(7), course.start(8)), (Start::Running, Start::Placed));
        // Taken: its own choice is not known before it is read, so nothing can be compared with it.
        course.asked(Some(outbox::ticket(2)));
        assert_eq!(course.choice(), Some(Err(outbox::ticket(2))));
        assert_eq!((course.stands(), course.start(7)), (Stands::Ready, Start::Placed));
    }

    #[test]
    fn what_was_left_is_never_taken() {
        let mut course = after(7);
        course.ran_ahead();
        assert!(course.leave(), "it runs");
        assert_eq!((course.stands(), course.start(7)), (Stands::Elsewhere, Start::Placed));
        assert!(!course.leave(), "left before");
        // The choice of the step that was asked for stays known.
        assert_eq!(course.choice(), Some(Ok(Choice { token: 7, finite: true })));
        course.forget();
        assert_eq!(course.choice(), None);
    }

    #[test]
    fn a_token_drawn_instead_replaces_the_choice() {
        let mut course = after(7);
        course.redrawn(outbox::ticket(2));
        assert_eq!((course.start(7), course.choice()), (Start::Placed, Some(Err(outbox::ticket(2)))));
        course.ran_ahead();
        course.knows(Choice { token: 9, finite: true });
        assert_eq!((course.start(9), course.start(7)), (Start::Running, Start::Placed));
    }

    #[test]
    fn a_step_without_a_choice_leads_nowhere() {
        let mut course = after(7);
        course.asked(None);
        assert_eq!((course.stands(), course.start(7)), (Stands::Elsewhere, Start::Placed));
    }
}
