//! The known state of the cluster at one moment, and the difference between two moments. Nothing here waits or reads a
//! clock.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::member::Member;

/// Members that are listed; what a source names beyond them is left out, and said.
pub const MEMBERS_MAX: usize = 4096;

/// The source's own word for a state: a revision of etcd, a Kubernetes resourceVersion, the count of readings of a
/// file or a name. Two are only ever equal or not.
pub type Revision = Arc<str>;

/// A member as a source lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedMember {
    /// The member.
    pub member: Arc<Member>,
    /// The source's revision of its latest change.
    pub revision: Revision,
}

/// The source cannot be read: what is known may be out of date.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceFailure {
    /// Since when, by [`crate::clock::now_us`].
    pub since_us: u64,
    /// The source's error, with the remedy.
    pub why: String,
}

/// Everything known at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Members by name.
    pub members: BTreeMap<String, ListedMember>,
    /// Of the source; empty before it was read once.
    pub revision: Revision,
    /// Grows with every snapshot of one directory; 0 before the source was read once.
    pub sequence: u64,
    /// Set while the source cannot be read.
    pub stale: Option<SourceFailure>,
    /// Members that the source names and that are not listed here, since they are wrong or too many.
    pub left_out: usize,
}

/// One step from what a subscriber knew to what is known now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The first that a subscriber gets: everything.
    Snapshot(Arc<Snapshot>),
    /// Was not there before.
    Joined(ListedMember),
    /// Is there in another form: other addresses, another life, other labels.
    Changed {
        /// As last reported.
        before: ListedMember,
        /// As it is.
        now: ListedMember,
    },
    /// It is no longer there.
    Left {
        /// As last reported.
        was: ListedMember,
        /// The source's revision without it.
        revision: Revision,
    },
    /// The source cannot be read. The last reported state stays valid until more is known.
    Stale(SourceFailure),
    /// The source can be read again, and the reported state matches it.
    Fresh,
}

/// The steps from `before` to `after`: who left, who changed, who joined, each by name; then the source's health.
#[must_use]
pub fn changes(before: &Snapshot, after: &Snapshot) -> Vec<Change> {
    let mut steps = Vec::new();
    let gone = before.members.iter().filter(|(name, _)| !after.members.contains_key(*name));
    steps.extend(gone.map(|(_, was)| Change::Left { was: was.clone(), revision: after.revision.clone() }));
    let mut joined = Vec::new();
    for (name, now) in &after.members {
        match before.members.get(name) {
            None => joined.push(Change::Joined(now.clone())),
            Some(was) if was.member == now.member => {}
            Some(was) => steps.push(Change::Changed { before: was.clone(), now: now.clone() }),
        }
    }
    steps.extend(joined);
    match (&before.stale, &after.stale) {
        (was, Some(stale)) if was.as_ref() != Some(stale) => steps.push(Change::Stale(stale.clone())),
        (Some(_), None) => steps.push(Change::Fresh),
        _ => {}
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::member::MemberRole;
    use proptest::prelude::*;

    /// The state of a subscriber that only gets changes.
    fn applied(before: &Snapshot, steps: &[Change]) -> (BTreeMap<String, Arc<Member>>, bool) {
        let mut members: BTreeMap<String, Arc<Member>> =
            before.members.iter().map(|(name, listed)| (name.clone(), listed.member.clone())).collect();
        let mut stale = before.stale.is_some();
        for step in steps {
            match step {
                Change::Snapshot(_) => panic!("only a new subscriber gets a snapshot"),
                Change::Joined(now) => {
                    let old = members.insert(now.member.name.clone(), now.member.clone());
                    assert_eq!(old, None, "who joins was not there");
                }
                Change::Changed { before, now } => {
                    let old = members.insert(now.member.name.clone(), now.member.clone());
                    assert_eq!(old.as_ref(), Some(&before.member));
                    assert_ne!(before.member, now.member, "who changed is not as before");
                }
                Change::Left { was, .. } => {
                    assert_eq!(members.remove(&was.member.name), Some(was.member.clone()));
                }
                Change::Stale(_) => stale = true,
                Change::Fresh => stale = false,
            }
        }
        (members, stale)
    }

    fn snapshot() -> impl Strategy<Value = Snapshot> {
        let member = (0..6u8, 0..3u64, any::<u8>());
        (prop::collection::vec(member, 0..8), 0..3u64, any::<u64>()).prop_map(|(list, stale, sequence)| {
            let listed = list.into_iter().map(|(name, epoch, revision)| {
                let mut member = Member::new(format!("m{name}"), MemberRole::Both, vec!["a:1".into()]);
                member.epoch = epoch;
                (
                    member.name.clone(),
                    ListedMember { member: Arc::new(member), revision: revision.to_string().into() },
                )
            });
            let stale = (stale > 0).then(|| SourceFailure { since_us: stale, why: "gone".into() });
            Snapshot { members: listed.collect(), revision: "r".into(), sequence, stale, left_out: 0 }
        })
    }

    proptest! {
        #[test]
        fn who_applies_the_changes_knows_what_is_known(before in snapshot(), after in snapshot()) {
            let steps = changes(&before, &after);
            let (members, stale) = applied(&before, &steps);
            let told: BTreeMap<_, _> = after.members.iter().map(|(n, l)| (n.clone(), l.member.clone())).collect();
            prop_assert_eq!(members, told);
            prop_assert_eq!(stale, after.stale.is_some());
            prop_assert!(changes(&after, &after).is_empty());
        }
    }
}
