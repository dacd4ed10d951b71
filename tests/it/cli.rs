//! The command line as such: help, version, and what it says to a slip of the finger.

use crate::program::Place;
use crate::rows;

#[test]
fn help_names_the_commands_and_every_command_has_help() {
    let help = Place::new().baton(&["--help"]).succeeded();
    assert!(help.stdout.contains("Usage: baton"), "{help:#?}");
    assert!(help.stderr.is_empty(), "{help:#?}");
    for command in ["replay", "trace", "profile", "paper"] {
        assert!(help.stdout.contains(&format!("\n  {command}")), "{command} is not listed: {help:#?}");
        let own = Place::new().baton(&[command, "--help"]).succeeded();
        assert!(own.stdout.contains(&format!("Usage: baton {command}")), "{own:#?}");
    }
}

#[test]
fn help_of_replay_and_stats_names_their_options() {
    let replay = Place::new().baton(&["replay", "--help"]).succeeded();
    for option in ["--config", "--policy", "--speed", "--admission", "--seed", "--json", "--require"] {
        assert!(replay.stdout.contains(option), "{option} is not in the help: {replay:#?}");
    }
    let stats = Place::new().baton(&["trace", "stats", "--help"]).succeeded();
    for option in ["--capacity", "--json"] {
        assert!(stats.stdout.contains(option), "{option} is not in the help: {stats:#?}");
    }
}

#[test]
fn version_is_the_package_version() {
    let version = Place::new().baton(&["--version"]).succeeded();
    assert_eq!(version.stdout, format!("baton {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn a_misspelt_command_or_option_is_answered_with_the_right_one() {
    Place::new().baton(&["repaly"]).refused(2, &["repaly", "'replay'"]);
    Place::new().baton(&["replay", "--polcy", "baton"]).refused(2, &["--polcy", "'--policy'"]);
}

#[test]
fn no_command_shows_the_usage() {
    Place::new().baton(&[]).refused(2, &["Usage: baton"]);
}

#[test]
fn a_file_that_is_not_there_is_named() {
    for command in [&["replay", "no-such.jsonl"][..], &["trace", "stats", "no-such.jsonl"]] {
        Place::new().baton(command).refused(1, &["no-such.jsonl"]);
    }
}

#[test]
fn a_reader_that_leaves_early_is_no_reason_to_panic() {
    let place = Place::new();
    place.write("t.jsonl", &rows::text(&rows::easy()));
    for args in [&["trace", "stats", "t.jsonl", "--json"][..], &["replay", "t.jsonl"], &["profile", "list"]] {
        assert!(!place.baton(args).succeeded().stdout.is_empty(), "{args:?} printed nothing");
        let outcome = place.baton_into_closed_pipe(args);
        assert!(!outcome.stderr.contains("panicked"), "{args:?}: {outcome:#?}");
    }
}

#[test]
fn more_threads_than_there_can_be_are_refused() {
    for command in [&["up"][..], &["serve"], &["store", "serve"]] {
        for threads in ["0", "99999"] {
            let words = ["--threads", "from 1 to 1024"];
            Place::new().baton(&[command, &["--threads", threads]].concat()).refused(2, &words);
        }
    }
}

#[test]
fn what_is_no_address_of_a_conductor_is_said_before_the_engine_is_loaded() {
    for address in ["localhost:9090", "10.0.0.5", "http://"] {
        let node = ["node", "--name", "a", "--role", "prefill", "--model", "none", "--conductor", address];
        Place::new().baton(&node).refused(1, &["--conductor", address]);
    }
}
