//! Two processes under one name: the second waits until the first is gone.

use super::bench::{Bench, hello};

fn of(name: &str, process: u64) -> baton_wire::v1::Hello {
    baton_wire::v1::Hello { process, ..hello(name, "prefill") }
}

#[tokio::test]
async fn a_second_process_of_a_name_is_refused_while_the_first_is_heard() {
    let mut bench = Bench::new(super::bench::config());
    assert_eq!(bench.send_hello(of("p0", 1)).await.unwrap().epoch, 1);
    for _ in 0..20 {
        bench.wait_alive_us(200_000, &[]).await;
        let why = bench.send_hello(of("p0", 2)).await.expect_err("the first is heard");
        assert!(why.contains("another process is attached as node p0") && why.contains("--name"), "{why}");
    }
    assert_eq!(bench.status().nodes[0].epoch, 1, "the first one's life goes on");
    // A process attaches again at once under its own name, whatever happened to its former connection.
    assert_eq!(bench.send_hello(of("p0", 1)).await.unwrap().epoch, 2);
    assert!(bench.send_hello(of("p0", 2)).await.is_err());
}

#[tokio::test]
async fn the_second_process_of_a_name_gets_in_once_the_first_is_silent_or_gone() {
    let mut bench = Bench::new(super::bench::config());
    bench.send_hello(of("p0", 1)).await.unwrap();
    bench.wait_alive_us(1_200_000, &["p0"]).await;
    assert_eq!(bench.send_hello(of("p0", 2)).await.unwrap().epoch, 2, "the first was silent");
    bench.kill("p0").await;
    assert_eq!(bench.send_hello(of("p0", 3)).await.unwrap().epoch, 3, "its line broke");
    // One of a release that does not tell is taken as before.
    assert_eq!(bench.send_hello(of("p0", 0)).await.unwrap().epoch, 4);
}
