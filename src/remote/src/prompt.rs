//! A prompt's token ids, and what every leg makes of them: computed once for both legs of a pair.

use std::ops::Deref;
use std::sync::{Arc, OnceLock, Weak};

use baton_types::ChainHasher;
use bytes::Bytes;
use parking_lot::Mutex;

use crate::digits;

/// A prompt's token ids. Clones share them, and the JSON that is written of them.
#[derive(Clone, Debug)]
pub struct Prompt(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    ids: Vec<u32>,
    digest: OnceLock<u64>,
    /// `[1,2,3]`, from the first leg that needs it until an answer has begun.
    json: Mutex<Option<Bytes>>,
}

/// A [`Prompt`] that is there as long as a request has it.
#[derive(Clone, Debug)]
pub struct WeakPrompt(Weak<Shared>);

impl WeakPrompt {
    /// Whether a request has it.
    #[must_use]
    pub fn is_used(&self) -> bool {
        self.0.strong_count() > 0
    }

    /// The prompt, unless its last request has ended.
    #[must_use]
    pub fn upgrade(&self) -> Option<Prompt> {
        self.0.upgrade().map(Prompt)
    }
}

impl Prompt {
    /// A reference to this prompt that does not keep it in memory.
    #[must_use]
    pub fn downgrade(&self) -> WeakPrompt {
        WeakPrompt(Arc::downgrade(&self.0))
    }

    /// The prompt as a number: two legs with the same one have the same prompt.
    pub(crate) fn digest(&self) -> u64 {
        *self.0.digest.get_or_init(|| ChainHasher::new(0, b"hand-off").push_tokens(&self.0.ids).short().0)
    }

    /// The ids as a JSON list. It is kept for the other leg, and for the engine's echo.
    pub(crate) fn json(&self) -> Bytes {
        let mut json = self.0.json.lock();
        json.get_or_insert_with(|| {
            let mut list = Vec::with_capacity(digits::room_bytes(&self.0.ids));
            digits::list(&mut list, &self.0.ids);
            list.into()
        })
        .clone()
    }

    /// Frees the JSON list: an answer that runs needs it no longer.
    pub(crate) fn forget_json(&self) {
        *self.0.json.lock() = None;
    }
}

impl From<Vec<u32>> for Prompt {
    fn from(ids: Vec<u32>) -> Self {
        Self(Arc::new(Shared { ids, digest: OnceLock::new(), json: Mutex::default() }))
    }
}

impl Deref for Prompt {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.0.ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(tokens: &[u32]) -> u64 {
        Prompt::from(tokens.to_vec()).digest()
    }

    #[test]
    fn prompts_differ_by_their_digests() {
        assert_eq!(digest(&[1, 2, 3]), digest(&[1, 2, 3]));
        assert_ne!(digest(&[1, 2, 3]), digest(&[1, 3, 2]));
        assert_ne!(digest(&[1, 2, 3]), digest(&[1, 2, 3, 0]));
        let long: Vec<u32> = (0..5_000).collect();
        assert_ne!(digest(&long), digest(&long[..4_999]));
    }

    #[test]
    fn both_legs_send_one_list_and_it_is_freed() {
        let prompt = Prompt::from(vec![7, 80_000]);
        let (first, second) = (prompt.json(), prompt.clone().json());
        assert_eq!(&*first, b"[7,80000]");
        assert_eq!(first.as_ptr(), second.as_ptr(), "written once");
        prompt.forget_json();
        assert!(prompt.0.json.lock().is_none());
        assert_eq!(prompt.json(), first, "written anew when needed again");
    }

    #[test]
    fn a_prompt_goes_with_its_last_request() {
        let prompt = Prompt::from(vec![1]);
        let weak = prompt.downgrade();
        assert_eq!(&*weak.upgrade().unwrap(), &[1]);
        drop(prompt);
        assert!(weak.upgrade().is_none());
    }
}
