//! Measures the quality of an index when announcements are lost, engines restart and the router restarts. Requests
//! routed by it must find nearly as much as with the true cache content, and in the end the two must be equal.

use baton_events::{Publisher, PublisherConfig, Subscriber};
use baton_types::Rng;

use crate::engine::{Engine, Follower, Prompt};
use crate::loopback::{anywhere, publish, quick};
use crate::wire::Proxy;

pub const ENGINES: u64 = 3;
pub const ROUNDS: usize = 80;
/// Batches that an index may be behind when it is asked.
const BEHIND: u64 = 3;

/// An engine behind a line that may lose batches, and who follows it.
pub struct Place {
    pub engine: Engine,
    publisher: Option<Publisher>,
    again: PublisherConfig,
    pub proxy: Proxy,
    pub follower: Follower,
    pub next: u64,
}

impl Place {
    /// One batch in so many is lost; none if that is 0.
    pub async fn new(seed: u64, one_in: u64) -> Self {
        let publisher = Publisher::bind(anywhere()).await.unwrap();
        let replay = publisher.replay_endpoint().map(str::to_owned);
        let again = PublisherConfig::new(publisher.endpoint(), replay);
        let proxy = Proxy::before(publisher.endpoint(), one_in).await;
        let follower = follow(&proxy, &again);
        let mut place =
            Self { engine: Engine::new(seed), publisher: Some(publisher), again, proxy, follower, next: 0 };
        place.go_on(1).await;
        place
    }

    async fn go_on(&mut self, steps: usize) {
        let publisher = self.publisher.as_ref().unwrap();
        self.next = publish(publisher, &mut self.engine, steps).await;
        self.nearly().await;
    }

    /// Serves a request.
    pub async fn serve(&mut self, prompt: &Prompt) {
        let publisher = self.publisher.as_ref().unwrap();
        self.next = publisher.announce(self.engine.serve(prompt)) + 1;
        self.nearly().await;
    }

    /// Waits until the follower is at most a few batches behind.
    async fn nearly(&mut self) {
        let next = self.next;
        self.follower.until(|f| f.next != u64::MAX && f.next + BEHIND >= next).await;
    }

    pub async fn restart(&mut self, seed: u64) {
        let epochs = self.follower.epochs.len();
        self.publisher = None;
        let publisher = loop {
            match Publisher::bind(self.again.clone()).await {
                Ok(publisher) => break publisher,
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(5)).await,
            }
        };
        (self.engine, self.publisher) = (Engine::new(seed), Some(publisher));
        self.next = publish(self.publisher.as_ref().unwrap(), &mut self.engine, 5).await;
        self.follower.until(|follower| follower.epochs.len() > epochs).await;
        self.nearly().await;
    }

    pub async fn known_anew(&mut self) {
        self.follower = follow(&self.proxy, &self.again);
        self.nearly().await;
    }
}

fn follow(proxy: &Proxy, config: &PublisherConfig) -> Follower {
    let config = quick(&proxy.endpoint, config.replay_endpoint.as_deref());
    Follower::new(Subscriber::start(config).unwrap())
}

/// Where a request goes that is sent to who is said to hold most of it.
fn choice(places: &[Place], held: impl Fn(&Place) -> usize) -> &Place {
    places.iter().rev().max_by_key(|place| held(place)).unwrap()
}

#[tokio::test]
async fn requests_find_nearly_as_much_as_if_nothing_were_lost_and_the_index_ends_true() {
    let mut rng = Rng::new(2026);
    let mut places = Vec::new();
    for seed in 0..ENGINES {
        places.push(Place::new(seed, 20).await);
    }
    let (mut found, mut best, mut restarts, mut anew) = (0, 0, 0, 0);
    for round in 0..ROUNDS {
        for (at, place) in places.iter_mut().enumerate() {
            if rng.below(15) == 0 {
                restarts += 1;
                place.restart(1000 + (round * 10 + at) as u64).await;
            }
            place.go_on(10).await;
        }
        if rng.below(15) == 0 {
            anew += 1;
            for place in &mut places {
                place.known_anew().await;
            }
        }
        for _ in 0..20 {
            let prompt = Prompt::draw(&mut rng);
            let told = choice(&places, |place| place.follower.holds(&prompt));
            let true_best = choice(&places, |place| place.engine.holds(&prompt));
            found += told.engine.holds(&prompt);
            best += true_best.engine.holds(&prompt);
        }
    }
    let mut lost = 0;
    for place in &mut places {
        place.follower.reach(place.next).await;
        assert_eq!(place.follower.index, place.engine.truth(), "the index is the truth in the end");
        lost += place.proxy.lost.load(std::sync::atomic::Ordering::SeqCst);
    }
    println!(
        "{lost} batches lost, {restarts} engine restarts, {anew} router restarts: {found} of {best} blocks found ({:.1} %)",
        found as f64 * 100.0 / best as f64
    );
    assert!(lost > 40 && restarts > 5 && anew > 2, "{lost} {restarts} {anew}");
    assert!(found * 100 >= best * 95, "{found} of {best} blocks were found");
}
