//! The known content of an engine's cache: announced by the engine, or assumed.

use std::sync::Arc;
use std::time::Instant;

use baton_types::{BlockKey, CacheChange};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use super::assumed::AssumedCache;
use super::drift::Drift;
use super::follower::{self, Attachment, EventSource};
use super::work::Work;

/// The source of what is known about an engine's cache.
pub(super) enum Knowledge {
    /// The engine announces changes to those that follow.
    Announced {
        attachments: watch::Sender<Option<Attachment>>,
        /// Notified when what is known proved wrong.
        drifted: Arc<Notify>,
        drift: Mutex<Drift>,
    },
    /// It holds what it computed last, as far as there is room.
    Assumed { cache: Mutex<AssumedCache>, capacity_blocks: u64 },
}

impl Knowledge {
    /// Nothing yet. An engine that announces is followed on the present runtime.
    pub(super) fn new(block_tokens: u32, capacity_blocks: u64, events: Option<EventSource>) -> Self {
        let Some(source) = events else {
            return Self::Assumed { cache: Mutex::new(AssumedCache::new(capacity_blocks)), capacity_blocks };
        };
        let (attachments, seen) = watch::channel(None);
        // It ends with the last clone of the legs, which hold the only sender.
        let drifted = Arc::new(Notify::new());
        tokio::spawn(follower::follow(source, block_tokens, seen, Arc::clone(&drifted)));
        Self::Announced { attachments, drifted, drift: Mutex::default() }
    }

    /// Another conductor, which knows nothing.
    pub(super) fn attached(&self, attachment: Attachment) {
        match self {
            Self::Announced { attachments, .. } => _ = attachments.send_replace(Some(attachment)),
            Self::Assumed { cache, capacity_blocks } => *cache.lock() = AssumedCache::new(*capacity_blocks),
        }
    }

    /// No conductor.
    pub(super) fn detached(&self) {
        if let Self::Announced { attachments, .. } = self {
            attachments.send_replace(None);
        }
    }

    /// The engine has computed this chain; returns what the conductor does not know of it.
    pub(super) fn computed(&self, chain: &[BlockKey]) -> Vec<CacheChange> {
        match self {
            Self::Assumed { cache, .. } => cache.lock().computed(chain),
            Self::Announced { .. } => Vec::new(),
        }
    }

    /// When the blocks of a chain that the engine is assumed to hold were last used, before it is asked for them.
    pub(super) fn held(&self, chain: &[BlockKey]) -> Vec<u64> {
        match self {
            Self::Assumed { cache, .. } => cache.lock().held(chain),
            Self::Announced { .. } => Vec::new(),
        }
    }

    /// The engine found so many tokens of a prompt in its cache. Returns whether what was known was wrong, and what the
    /// conductor has to know. `held` is what [`Self::held`] gave before.
    pub(super) fn found(
        &self,
        work: &Work,
        held: &[u64],
        (found_tokens, block_tokens): (u64, u32),
    ) -> (bool, Vec<CacheChange>) {
        match self {
            Self::Assumed { cache, .. } => {
                // An engine computes one token at least, so that it never finds the last block of a whole prompt.
                let block_tokens = block_tokens.max(1) as usize;
                let most = work.request.tokens.len().saturating_sub(1) / block_tokens;
                let found = usize::try_from(found_tokens).unwrap_or(usize::MAX) / block_tokens;
                let news = cache.lock().found(&held[..held.len().min(most)], found);
                (!news.is_empty(), news)
            }
            Self::Announced { drifted, drift, .. } => {
                let expected = work.expected_tokens;
                let wrong = expected
                    .is_some_and(|expected| drift.lock().note(expected, found_tokens, Instant::now()));
                if wrong {
                    tracing::warn!("the engine's cache is not as it announced: all of it is learnt anew");
                    drifted.notify_one();
                }
                (wrong, Vec::new())
            }
        }
    }
}
