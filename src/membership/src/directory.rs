//! The directory: what a source last said, and one stream of changes for each who wants to know.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::error::Result;
use crate::member::Member;
use crate::source::Source;
use crate::view::{Change, ListedMember, MEMBERS_MAX, Revision, Snapshot, SourceFailure, changes};

/// The known members of the cluster. Reading it never waits. The source is followed until this is dropped.
///
/// A subscriber that falls behind gets the difference between its last state and the current one. The directory keeps
/// no queue for it, so it does not report a member that came and went meanwhile.
#[derive(Debug)]
pub struct Directory {
    latest: watch::Receiver<Arc<Snapshot>>,
    _stop: DropGuard,
}

impl Directory {
    /// Begins to follow `source`; must be called in a tokio runtime.
    ///
    /// # Errors
    /// When the source is configured in a way that can never work.
    pub fn start(source: Source) -> Result<Self> {
        let (board, latest) = Board::new();
        let stop = CancellationToken::new();
        let following = source.following(board, stop.clone())?;
        tokio::spawn(following);
        Ok(Self { latest, _stop: stop.drop_guard() })
    }

    /// The current state.
    #[must_use]
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.latest.borrow().clone()
    }

    /// Waits until the source was read once; wrap it in a timeout.
    pub async fn read_once(&self) -> Arc<Snapshot> {
        let mut latest = self.latest.clone();
        match latest.wait_for(|snapshot| snapshot.sequence > 0).await {
            Ok(snapshot) => snapshot.clone(),
            // The source was stopped: what is known stays known.
            Err(_) => self.snapshot(),
        }
    }

    /// A stream of changes that begins with a snapshot, once there is one.
    #[must_use]
    pub fn changes(&self) -> Changes {
        Changes { latest: self.latest.clone(), reported: None, waiting: VecDeque::new() }
    }
}

/// One subscriber's stream of changes.
#[derive(Debug)]
pub struct Changes {
    latest: watch::Receiver<Arc<Snapshot>>,
    reported: Option<Arc<Snapshot>>,
    /// Steps towards `reported`; at most two for each member.
    waiting: VecDeque<Change>,
}

impl Changes {
    /// The next change; `None` once the directory is gone. Nothing is lost when the caller stops waiting.
    pub async fn next(&mut self) -> Option<Change> {
        loop {
            if let Some(change) = self.waiting.pop_front() {
                return Some(change);
            }
            let now = self.latest.borrow_and_update().clone();
            match &self.reported {
                None if now.sequence > 0 => {
                    self.reported = Some(now.clone());
                    return Some(Change::Snapshot(now));
                }
                Some(reported) if !Arc::ptr_eq(reported, &now) => {
                    self.waiting.extend(changes(reported, &now));
                    self.reported = Some(now);
                    continue;
                }
                _ => {}
            }
            self.latest.changed().await.ok()?;
        }
    }
}

/// Where a source writes what it learns.
#[derive(Debug)]
pub(crate) struct Board {
    sender: watch::Sender<Arc<Snapshot>>,
}

impl Board {
    /// An empty board, and what readers look at.
    pub(crate) fn new() -> (Self, watch::Receiver<Arc<Snapshot>>) {
        let unread = SourceFailure { since_us: crate::clock::now_us(), why: "not read yet".to_owned() };
        let (sender, latest) =
            watch::channel(Arc::new(Snapshot { stale: Some(unread), ..Snapshot::default() }));
        (Self { sender }, latest)
    }

    /// The source was read as a whole: these are all there are, and `left_out` more that cannot be listed. Members
    /// that are as before keep the revision that they had.
    pub(crate) fn replace(
        &self,
        members: impl IntoIterator<Item = ListedMember>,
        revision: Revision,
        left_out: usize,
    ) {
        let before = self.sender.borrow().clone();
        let mut listed = BTreeMap::new();
        let mut surplus = 0;
        for one in members {
            if listed.len() == MEMBERS_MAX && !listed.contains_key(&one.member.name) {
                surplus += 1;
                continue;
            }
            let same = before.members.get(&one.member.name).filter(|was| was.member == one.member);
            let one = same.cloned().unwrap_or(one);
            listed.insert(one.member.name.clone(), one);
        }
        let left_out = left_out + surplus;
        if left_out > before.left_out {
            tracing::warn!(left_out, "members are left out: they are wrong, or more than {MEMBERS_MAX}");
        }
        let snapshot =
            Snapshot { members: listed, revision, sequence: before.sequence + 1, stale: None, left_out };
        // A poll that finds everything as it was wakes nobody.
        let same = before.sequence > 0
            && before.stale.is_none()
            && before.left_out == left_out
            && before.members == snapshot.members;
        if !same {
            self.sender.send_replace(Arc::new(snapshot));
        }
    }

    /// The source can be read again and is as it was.
    pub(crate) fn fresh(&self) {
        self.sender.send_if_modified(|latest| {
            let again = latest.stale.is_some() && latest.sequence > 0;
            if again {
                let snapshot = Arc::make_mut(latest);
                snapshot.stale = None;
                snapshot.sequence += 1;
            }
            again
        });
    }

    /// The source cannot be read; the first reason since it last could stays.
    pub(crate) fn stale(&self, why: &str) {
        self.sender.send_if_modified(|latest| {
            let news = latest.stale.as_ref().is_none_or(|stale| stale.why != why);
            if news {
                let since_us =
                    latest.stale.as_ref().map_or_else(crate::clock::now_us, |stale| stale.since_us);
                Arc::make_mut(latest).stale = Some(SourceFailure { since_us, why: why.to_owned() });
                tracing::warn!(why, "the directory's source cannot be read; keeping what is known");
            }
            news
        });
    }
}

/// A member as listed at `revision`, if it is one.
pub(crate) fn listed(member: Member, revision: &Revision) -> Result<ListedMember> {
    member.validate()?;
    Ok(ListedMember { member: Arc::new(member), revision: revision.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::member::MemberRole;

    fn of(names: &[&str], revision: &str) -> Vec<ListedMember> {
        let revision: Revision = revision.into();
        let member = |name: &&str| Member::new(*name, MemberRole::Decode, vec!["a:1".into()]);
        names.iter().map(|name| listed(member(name), &revision).expect("valid")).collect()
    }

    fn names(snapshot: &Snapshot) -> Vec<&str> {
        snapshot.members.keys().map(String::as_str).collect()
    }

    #[tokio::test]
    async fn a_subscriber_hears_a_snapshot_and_then_each_change_once() {
        let (board, latest) = Board::new();
        let mut stream = Changes { latest: latest.clone(), reported: None, waiting: VecDeque::new() };
        board.stale("down");
        board.replace(of(&["a", "b"], "1"), "1".into(), 0);
        let Some(Change::Snapshot(first)) = stream.next().await else { panic!("a snapshot first") };
        assert_eq!((names(&first), &*first.revision), (vec!["a", "b"], "1"));
        board.replace(of(&["b", "c"], "2"), "2".into(), 0);
        assert!(matches!(stream.next().await, Some(Change::Left { was, revision })
            if was.member.name == "a" && &*revision == "2"));
        assert!(matches!(stream.next().await, Some(Change::Joined(now))
            if now.member.name == "c" && &*now.revision == "2"));
        assert_eq!(&*latest.borrow().members["b"].revision, "1", "b did not change");
        board.stale("gone");
        board.fresh();
        board.stale("gone again");
        assert!(matches!(stream.next().await, Some(Change::Stale(stale)) if stale.why == "gone again"));
        assert_eq!(names(&latest.borrow()), ["b", "c"], "what is known stays known");
        board.replace(of(&["b", "c"], "3"), "3".into(), 0);
        assert_eq!(stream.next().await, Some(Change::Fresh));
        drop(board);
        assert_eq!(stream.next().await, None);
    }

    #[tokio::test]
    async fn a_poll_without_news_wakes_nobody_and_surplus_is_counted() {
        let (board, mut latest) = Board::new();
        board.replace(of(&["a"], "1"), "1".into(), 0);
        latest.mark_unchanged();
        board.replace(of(&["a"], "2"), "2".into(), 0);
        board.fresh();
        assert!(!latest.has_changed().expect("the board lives"));
        let many: Vec<String> = (0..MEMBERS_MAX + 3).map(|i| format!("m{i:05}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        board.replace(of(&many, "3"), "3".into(), 2);
        assert_eq!((latest.borrow().members.len(), latest.borrow().left_out), (MEMBERS_MAX, 5));
    }

    #[test]
    fn stale_keeps_its_beginning_while_the_reason_changes() {
        let (board, latest) = Board::new();
        board.replace(of(&["a"], "1"), "1".into(), 0);
        board.stale("one");
        let since = latest.borrow().stale.clone().expect("stale").since_us;
        std::thread::sleep(std::time::Duration::from_millis(1));
        board.stale("two");
        let stale = latest.borrow().stale.clone().expect("stale");
        assert_eq!((stale.since_us, stale.why.as_str()), (since, "two"));
        board.fresh();
        assert_eq!(latest.borrow().stale, None);
    }
}
