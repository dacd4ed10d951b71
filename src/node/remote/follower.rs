//! An engine's announcements of its cache, translated into the conductor's names.
//!
//! Every request goes to the engine under a salt that is the root of its chain in words. The engine's own hashes commit
//! to it, so that tenants share nothing there either, and its announcements tell it: that is how their blocks are named.

use baton_events::{Batch, ExtraKey, Feed, Lineage, Mirror, MirrorConfig, Subscriber, SubscriberConfig};
use baton_types::{BlockKey, CacheChange};
use baton_wire::v1;
use std::sync::Arc;
use tokio::sync::{Notify, mpsc, watch};

use super::remote_legs::{cache_fact, message};

/// Changes in one message at most.
const MESSAGE_CHANGES: usize = 256;

/// One attachment to the conductor.
#[derive(Clone, Debug)]
pub(super) struct Attachment {
    pub(super) chain_seed: u64,
    pub(super) facts: mpsc::Sender<v1::FromNode>,
}

/// The source of announcements that a node follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventSource {
    /// Where the engine announces, and repeats, what happens in its cache.
    pub subscriber: SubscriberConfig,
    /// The data-parallel rank whose announcements count, where there are several.
    pub dp_rank: Option<u32>,
}

/// The salt of the requests whose chains begin at `root`.
pub(super) fn salt_of(root: BlockKey) -> String {
    format!("{:032x}", root.0)
}

/// The root that a salt stands for, if it is one of ours.
fn root_of(salt: &str) -> Option<BlockKey> {
    let ours = salt.len() == 32 && salt.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    u128::from_str_radix(salt, 16).ok().filter(|_| ours).map(BlockKey)
}

/// Engines tell a salt as it is, or with a tag before it.
fn root_in(lineage: &Lineage<'_>) -> Option<BlockKey> {
    fn find(key: &ExtraKey) -> Option<BlockKey> {
        match key {
            ExtraKey::Text(text) => root_of(text),
            ExtraKey::List(keys) => keys.iter().find_map(find),
            ExtraKey::Bytes(_) | ExtraKey::Number(_) => None,
        }
    }
    // An adapter or a picture makes another chain, which nobody is routed by.
    let alone = lineage.lora.is_none() && lineage.extra.len() == 1;
    lineage.extra.iter().find_map(|key| find(key)).filter(|_| alone)
}

/// Follows the engine as long as the node may attach, and reports to the conductor that it is attached to.
pub(super) async fn follow(
    source: EventSource,
    block_tokens: u32,
    mut attachments: watch::Receiver<Option<Attachment>>,
    drifted: Arc<Notify>,
) {
    loop {
        let Some(attachment) = attachments.borrow_and_update().clone() else {
            if attachments.changed().await.is_err() {
                return;
            }
            continue;
        };
        let Ok(subscriber) = Subscriber::start(source.subscriber.clone()) else {
            // It was checked when the node started.
            return;
        };
        let config =
            MirrorConfig { chain_seed: attachment.chain_seed, block_tokens, ..MirrorConfig::default() };
        let mirror = Mirror::new(config, Box::new(root_in));
        let dp_rank = source.dp_rank;
        let followed =
            FollowedEngine { subscriber, mirror, dp_rank, attachment: Some(attachment), drifted: &drifted };
        if followed.run(&mut attachments).await.is_err() {
            return;
        }
    }
}

struct FollowedEngine<'a> {
    subscriber: Subscriber,
    mirror: Mirror,
    dp_rank: Option<u32>,
    attachment: Option<Attachment>,
    /// Notifies that the known content proved wrong.
    drifted: &'a Notify,
}

/// The node will not attach again.
struct DetachedError;

impl FollowedEngine<'_> {
    /// Runs until the keys of blocks are made otherwise, or all has to be learnt anew.
    async fn run(
        mut self,
        attachments: &mut watch::Receiver<Option<Attachment>>,
    ) -> Result<(), DetachedError> {
        let chain_seed = self.attachment.as_ref().map(|attachment| attachment.chain_seed);
        loop {
            let mut changes = Vec::new();
            tokio::select! {
                changed = attachments.changed() => {
                    changed.map_err(|_| DetachedError)?;
                    self.attachment = attachments.borrow_and_update().clone();
                    match &self.attachment {
                        Some(attachment) if Some(attachment.chain_seed) != chain_seed => return Ok(()),
                        // The conductor knows nothing of this life yet.
                        Some(_) => changes = self.mirror.snapshot(),
                        None => {}
                    }
                }
                // The next follower begins with what the engine still repeats, and reports the rest as void.
                () = self.drifted.notified() => return Ok(()),
                feed = self.subscriber.next() => match feed.ok_or(DetachedError)? {
                    Feed::Cleared { epoch, why } => {
                        if epoch > 1 {
                            tracing::warn!(epoch, ?why, "what was known of the engine's cache is void");
                        }
                        self.mirror.forget(&mut changes);
                    }
                    Feed::Batch { batch, .. } => self.take(&batch, &mut changes),
                },
            }
            self.report(&changes).await;
        }
    }

    fn take(&mut self, batch: &Batch, changes: &mut Vec<CacheChange>) {
        let other = |rank: u32| self.dp_rank.is_some_and(|ours| ours != rank);
        if !batch.dp_rank.is_some_and(other) {
            self.mirror.apply(batch, changes);
        }
    }

    async fn report(&self, changes: &[CacheChange]) {
        let Some(attachment) = &self.attachment else { return };
        for part in changes.chunks(MESSAGE_CHANGES) {
            // A conductor that is gone gets all changes again, from the beginning, once it is back.
            let _ = attachment.facts.send(message(0, 0, part.iter().map(cache_fact).collect())).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_salt_says_which_root_it_stands_for() {
        for root in [BlockKey(0), BlockKey(7), BlockKey(u128::MAX), BlockKey(1 << 100)] {
            assert_eq!(root_of(&salt_of(root)), Some(root));
        }
        for odd in ["", "7", "+0000000000000000000000000000001", "0000000000000000000000000000000G"] {
            assert_eq!(root_of(odd), None, "{odd}");
        }
    }

    #[test]
    fn only_chains_that_differ_by_their_salt_alone_are_named() {
        let salt = ExtraKey::Text(salt_of(BlockKey(9)));
        let tagged = ExtraKey::List(vec![ExtraKey::Text("cache_salt".into()), salt.clone()]);
        let other = ExtraKey::Text("a picture".into());
        let root = |lora, extra: &[&ExtraKey]| root_in(&Lineage { lora, extra, source: None });
        assert_eq!(root(None, &[&salt]), Some(BlockKey(9)));
        assert_eq!(root(None, &[&tagged]), Some(BlockKey(9)));
        assert_eq!(root(None, &[&other]), None);
        assert_eq!(root(None, &[&salt, &other]), None);
        assert_eq!(root(Some("adapter"), &[&salt]), None);
        assert_eq!(root(None, &[]), None);
    }
}
