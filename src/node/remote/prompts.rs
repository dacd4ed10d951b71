//! Prompts that two legs of this process share: an order for the decode engine carries the very tokens that the order for
//! its prefill engine does, and they are unpacked and written once.

use std::collections::VecDeque;
use std::sync::Arc;

use baton_remote::{Prompt, WeakPrompt};
use baton_wire::v1::TokenRun;
use parking_lot::Mutex;

/// Prompts that are looked through. The orders of a pair come one after the other, with few others in between.
const RECENT_MOST: usize = 32;

/// The latest prompts of the nodes of one process. Clones share them.
#[derive(Clone, Default)]
pub struct Prompts(Arc<Mutex<VecDeque<RecentPrompt>>>);

/// While these runs are kept, no other tokens lie where theirs do.
struct RecentPrompt {
    runs: Vec<TokenRun>,
    prompt: WeakPrompt,
}

impl Prompts {
    /// The prompt of `runs`; `None` for runs that are torn.
    pub(super) fn of(&self, runs: Vec<TokenRun>) -> Option<Prompt> {
        let known = {
            let mut recent = self.0.lock();
            // Drops the packed tokens of prompts that no request uses.
            recent.retain(|recent| recent.prompt.is_used());
            recent.iter().find(|recent| lie_together(&recent.runs, &runs)).and_then(|r| r.prompt.upgrade())
        };
        if known.is_some() {
            return known;
        }
        let prompt = Prompt::from(baton_wire::unpack_tokens(&runs)?);
        let mut recent = self.0.lock();
        if recent.len() == RECENT_MOST {
            recent.pop_front();
        }
        recent.push_back(RecentPrompt { runs, prompt: prompt.downgrade() });
        Some(prompt)
    }
}

/// Whether both are the same bytes in memory.
fn lie_together(one: &[TokenRun], other: &[TokenRun]) -> bool {
    let place = |run: &TokenRun| (run.packed.as_ptr(), run.packed.len(), run.width);
    one.iter().map(place).eq(other.iter().map(place))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(tokens: &[u32]) -> Vec<TokenRun> {
        baton_wire::pack_tokens(&tokens.into())
    }

    #[test]
    fn the_same_bytes_are_unpacked_once() {
        let prompts = Prompts::default();
        let runs = packed(&[1, 2, 70_000]);
        let (first, second) = (prompts.of(runs.clone()).unwrap(), prompts.of(runs).unwrap());
        assert_eq!(first.as_ptr(), second.as_ptr());
        // Alike, and not the same.
        let other = prompts.of(packed(&[1, 2, 70_000])).unwrap();
        assert_ne!(first.as_ptr(), other.as_ptr());
        assert_eq!(&*first, &*other);
    }

    #[test]
    fn what_nobody_uses_is_not_kept_and_the_others_are_bounded() {
        let prompts = Prompts::default();
        for at in 0..100 {
            prompts.of(packed(&[at])).unwrap();
        }
        assert_eq!(prompts.0.lock().len(), 1);
        let kept: Vec<Prompt> = (0..100).map(|at| prompts.of(packed(&[at])).unwrap()).collect();
        assert_eq!(prompts.0.lock().len(), RECENT_MOST);
        assert!(kept.iter().zip(0..).all(|(prompt, at)| **prompt == [at]));
    }

    #[test]
    fn torn_runs_are_refused() {
        let torn = TokenRun { packed: vec![1, 2, 3].into(), width: 2 };
        assert!(Prompts::default().of(vec![torn]).is_none());
    }
}
