//! What a model that has learnt the corpus must answer: every question of the small talk, and stories on what
//! was asked for.
use super::{Story, chat};
use crate::behaviour::Case;

/// One row for each question there is. Wordings that only validation asks are groups of their own,
/// `NAME-heldout`.
pub fn suite() -> Vec<Case> {
    let row = |group: String, prompt: String, must: String| Case {
        group,
        prompt,
        must: vec![must],
        must_not: Vec::new(),
        weight: 1.0,
    };
    let talk = chat::every().into_iter().map(|e| {
        let group = if e.reserved { format!("{}-heldout", e.about) } else { e.about.to_owned() };
        row(group, e.question, e.answer)
    });
    let stories = Story::requests().into_iter().map(|(prompt, must)| row("story".into(), prompt, must));
    talk.chain(stories).collect()
}
