//! Prompts and client bodies that two legs of this process share: an order for the decode engine carries the very tokens
//! and fields that the order for its prefill engine does, and they are read and written once.

use std::collections::VecDeque;
use std::sync::Arc;

use baton_remote::{ClientBody, Prompt, WeakPrompt};
use baton_wire::v1::TokenRun;
use bytes::Bytes;
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
    body: ClientBody,
}

impl Prompts {
    /// The prompt of `runs` and the client's `body`; `None` for runs that are torn.
    pub(super) fn of(&self, runs: Vec<TokenRun>, body: Bytes) -> Option<(Prompt, ClientBody)> {
        let known = {
            let mut recent = self.0.lock();
            // Drops the packed tokens and the bodies of prompts that no request uses.
            recent.retain(|recent| recent.prompt.is_used());
            let same = |one: &&RecentPrompt| are_adjacent(&one.runs, &runs) && one.body.bytes() == &body;
            recent.iter().find(same).and_then(|one| Some((one.prompt.upgrade()?, one.body.clone())))
        };
        if known.is_some() {
            return known;
        }
        let (prompt, body) = (Prompt::from(baton_wire::unpack_tokens(&runs)?), ClientBody::from(body));
        let mut recent = self.0.lock();
        if recent.len() == RECENT_MOST {
            recent.pop_front();
        }
        recent.push_back(RecentPrompt { runs, prompt: prompt.downgrade(), body: body.clone() });
        Some((prompt, body))
    }
}

/// Whether both are the same bytes in memory.
fn are_adjacent(one: &[TokenRun], other: &[TokenRun]) -> bool {
    let place = |run: &TokenRun| (run.packed.as_ptr(), run.packed.len(), run.width);
    one.iter().map(place).eq(other.iter().map(place))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(tokens: &[u32]) -> Vec<TokenRun> {
        baton_wire::pack_tokens(&tokens.into())
    }

    fn prompt(prompts: &Prompts, runs: Vec<TokenRun>) -> Option<Prompt> {
        prompts.of(runs, Bytes::new()).map(|(prompt, _)| prompt)
    }

    #[test]
    fn the_same_bytes_are_unpacked_once() {
        let prompts = Prompts::default();
        let runs = packed(&[1, 2, 70_000]);
        let (first, second) = (prompt(&prompts, runs.clone()).unwrap(), prompt(&prompts, runs).unwrap());
        assert_eq!(first.as_ptr(), second.as_ptr());
        // Alike, and not the same.
        let other = prompt(&prompts, packed(&[1, 2, 70_000])).unwrap();
        assert_ne!(first.as_ptr(), other.as_ptr());
        assert_eq!(&*first, &*other);
    }

    #[test]
    fn a_body_is_shared_with_its_prompt() {
        let prompts = Prompts::default();
        let runs = packed(&[1, 2]);
        let of = |body: &[u8]| prompts.of(runs.clone(), Bytes::copy_from_slice(body)).unwrap();
        let ((_one, first), (_two, second)) = (of(b"{\"a\":1}"), of(b"{\"a\":1}"));
        assert_eq!(first.bytes().as_ptr(), second.bytes().as_ptr());
        // Two requests may share their tokens and differ in their fields.
        let (_three, other) = of(b"{\"b\":1}");
        assert!(other.sets("b") && !other.sets("a"));
    }

    #[test]
    fn what_nobody_uses_is_not_kept_and_the_others_are_bounded() {
        let prompts = Prompts::default();
        for at in 0..100 {
            prompt(&prompts, packed(&[at])).unwrap();
        }
        assert_eq!(prompts.0.lock().len(), 1);
        let kept: Vec<Prompt> = (0..100).map(|at| prompt(&prompts, packed(&[at])).unwrap()).collect();
        assert_eq!(prompts.0.lock().len(), RECENT_MOST);
        assert!(kept.iter().zip(0..).all(|(prompt, at)| **prompt == [at]));
    }

    #[test]
    fn torn_runs_are_refused() {
        let torn = TokenRun { packed: vec![1, 2, 3].into(), width: 2 };
        assert!(prompt(&Prompts::default(), vec![torn]).is_none());
    }
}
