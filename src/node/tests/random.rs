//! Random orders, sensible and not, in any order: the node neither panics nor keeps anything, and
//! serves as before.

use baton_types::Rng;
use baton_wire::v1;
use baton_wire::v1::order::Order;

use super::conductor::{Stage, VOCABULARY, nobody, with_tokens, work};

fn any_work(rng: &mut Rng) -> v1::Work {
    let mut work = work(1 + u32::try_from(rng.below(130)).unwrap());
    match rng.below(12) {
        0 => work.prompt_tokens = u32::try_from(rng.below(200)).unwrap(),
        1 => {
            let odd = VOCABULARY + u32::try_from(rng.below(9)).unwrap();
            work = with_tokens(work, |tokens| tokens[0] = odd);
        }
        2 => work.chain = super::conductor::work(400).chain,
        3 => work.chain = work.chain.slice(..work.chain.len() / 2),
        4 => work.sampling = None,
        5 => work = with_tokens(work, |tokens| tokens.push(7)),
        6 => work.tokens[0].width = u32::try_from(rng.below(6)).unwrap(),
        7 => work.chain = Default::default(),
        _ => {}
    }
    work
}

fn any_order(rng: &mut Rng) -> Order {
    let room_tokens = [0, 1, 40, 400, u32::MAX][usize::try_from(rng.below(5)).unwrap()];
    let peer = |rng: &mut Rng| (rng.below(4) == 0).then(nobody);
    match rng.below(16) {
        0..5 => Order::Prefill(v1::Prefill {
            work: Some(any_work(rng)),
            decode: peer(rng),
            fetch_from: peer(rng),
            fetch_blocks: u32::try_from(rng.below(9)).unwrap(),
            room_tokens,
            order: rng.below(3),
            expected_tokens: None,
        }),
        5..8 => Order::Expect(v1::Expect { work: Some(any_work(rng)), room_tokens }),
        8..11 => {
            let answer = (0..rng.below(4)).map(|at| u32::try_from(at * 100).unwrap()).collect();
            Order::StartDecode(v1::StartDecode { answer })
        }
        11 => Order::Handoff(v1::Handoff { to: peer(rng) }),
        12 => Order::Replicate(v1::Replicate { from: peer(rng), chain: any_work(rng).chain }),
        _ => Order::Release(v1::Release {}),
    }
}

#[tokio::test]
async fn no_orders_whatever_break_a_node_or_leave_anything_held() {
    let mut stage = Stage::start().await;
    let mut line = stage.attach().await;
    let answer = line.serve(1, work(50)).await;
    for seed in 1..=6 {
        let mut rng = Rng::new(seed);
        for step in 0..400u32 {
            let (request, attempt) = (2 + rng.below(9), u32::try_from(1 + rng.below(3)).unwrap());
            let order = any_order(&mut rng);
            line.order(request, attempt, order).await;
            if step % 50 == 0 {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        }
        if seed % 2 == 0 {
            drop(line);
            line = stage.attach().await;
        }
        for request in 2..11 {
            line.release(request).await;
        }
        line.idle().await;
        assert_eq!(line.serve(1000 + seed, work(50)).await, answer, "seed {seed}");
    }
    stage.end().await;
}
