//! Findings of libibverbs, where this program is built with it.

use baton_transports::mover::topology::Machine;

use super::findings::{Finding, Level};

/// The remedy where this program is built without it.
pub(super) const WITHOUT: &str = "this program is built without RDMA; build it with --features rdma-dlopen";

/// A device by name, and what libibverbs says of it or why it cannot be opened.
pub(super) type View = (String, Result<String, String>);

/// The view of each device in libibverbs; `None` where this program is built without it.
#[cfg(any(feature = "rdma", feature = "rdma-dlopen"))]
pub(super) fn views() -> Option<Vec<View>> {
    use baton_transports::mover::rdma::device_views;
    let text = |view: baton_transports::mover::rdma::OpenedView| {
        let state = if view.active { "active" } else { "not active" };
        let (mtu, most) = view.mtu_bytes;
        format!(
            "port {state}, packets of {mtu} bytes (at most {most}), {} requests a queue pair, regions up to {} GiB",
            view.queue_works_max,
            view.region_bytes_max >> 30
        )
    };
    Some(device_views().into_iter().map(|view| (view.name, view.opened.map(text))).collect())
}

/// The view of each device in libibverbs; `None` where this program is built without it.
#[cfg(not(any(feature = "rdma", feature = "rdma-dlopen")))]
pub(super) fn views() -> Option<Vec<View>> {
    None
}

/// Compares what libibverbs sees with what the kernel has.
pub(super) fn examine(machine: &Machine, views: Option<&[View]>) -> Vec<Finding> {
    let Some(views) = views else {
        return vec![Finding::new(Level::Note, "verbs", WITHOUT.to_owned(), None)];
    };
    let mut found = Vec::new();
    for (name, view) in views {
        found.push(match view {
            Ok(text) => Finding::new(Level::Fine, name, format!("opens: {text}"), None),
            Err(error) => {
                let remedy = "let this user read and write /dev/infiniband/uverbs*";
                Finding::new(Level::Problem, name, format!("does not open: {error}"), Some(remedy))
            }
        });
    }
    for nic in machine.nics.iter().filter(|nic| !views.iter().any(|(name, _)| *name == nic.name)) {
        let remedy = "install libibverbs1 and ibverbs-providers, and give /dev/infiniband to the container";
        let text = "the kernel has it, but libibverbs does not see it".to_owned();
        found.push(Finding::new(Level::Problem, &nic.name, text, Some(remedy)));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_do_not_open_or_are_not_seen_are_problems() {
        let nic = |name: &str| baton_transports::mover::topology::Nic {
            name: name.into(),
            numa: None,
            pci: Vec::new(),
            ports: Vec::new(),
            interfaces: Vec::new(),
        };
        let machine = Machine { nics: ["a", "b", "c"].map(nic).to_vec(), ..Machine::default() };
        let views = [("a".into(), Ok("fine".into())), ("b".into(), Err("denied".into()))];
        let found = examine(&machine, Some(&views));
        let levels: Vec<(&str, Level)> = found.iter().map(|one| (one.subject.as_str(), one.level)).collect();
        assert_eq!(levels, [("a", Level::Fine), ("b", Level::Problem), ("c", Level::Problem)]);
        assert!(examine(&machine, None)[0].text.contains("--features"));
    }
}
