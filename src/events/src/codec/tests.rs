use super::*;
use crate::model::{
    Batch, BlockExtra, Change, EngineHash, Event, ExtraKey, Medium, RemovedBlocks, Source, StoredBlocks,
};
use crate::msgpack::Writer;
use proptest::collection::vec;
use proptest::prelude::*;

/// A batch around events that `write` puts down.
fn batch(events: usize, write: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.array(2);
    writer.float(2.5);
    writer.array(events);
    write(&mut writer);
    writer.finish()
}

fn read(bytes: &[u8]) -> Result<Batch, crate::EventError> {
    decode(3, bytes, &Limits::default())
}

fn only(bytes: &[u8]) -> Event {
    let mut events = read(bytes).unwrap().events;
    assert_eq!(events.len(), 1);
    events.remove(0)
}

/// `["BlockStored", [7, -1], nil, tokens, 2]` and then whatever `rest` adds.
fn old_stored(fields: usize, tokens: impl FnOnce(&mut Writer), rest: impl FnOnce(&mut Writer)) -> Vec<u8> {
    batch(1, |w| {
        w.array(fields);
        w.text("BlockStored");
        w.array(2);
        w.unsigned(7);
        w.unsigned(u64::MAX);
        w.nil();
        tokens(w);
        w.unsigned(2);
        rest(w);
    })
}

fn listed(w: &mut Writer) {
    w.array(4);
    (1..=4).for_each(|token| w.unsigned(token));
}

#[test]
fn arrays_of_older_engines_are_read_by_place() {
    let shortest = read(&old_stored(5, listed, |_| ())).unwrap();
    assert_eq!((shortest.sequence, shortest.time_us, shortest.dp_rank), (3, 2_500_000, None));
    let stored = StoredBlocks {
        hashes: vec![EngineHash::Word(7), EngineHash::Word(u64::MAX)],
        tokens: vec![1, 2, 3, 4],
        block_tokens: 2,
        ..StoredBlocks::default()
    };
    assert_eq!(shortest.events, [Event::from(Change::Stored(stored.clone()))]);
    let longest = only(&old_stored(13, listed, |w| {
        w.unsigned(5);
        w.text("CPU");
        w.text("poet");
        w.array(2);
        w.array(1);
        w.text("salt");
        w.nil();
        w.unsigned(0);
        w.text("full_attention");
        w.array(1);
        w.text("a field of the future");
        w.nil();
    }));
    let extra = vec![BlockExtra { block: 0, keys: vec![ExtraKey::Text("salt".into())] }];
    let (medium, lora) = (Some(Medium::Cpu), Some("poet".into()));
    let attention = Some("full_attention".into());
    let all = StoredBlocks { medium, lora, extra, group: Some(0), attention, ..stored };
    assert_eq!(longest, Event::from(Change::Stored(all)));
}

#[test]
fn an_adapter_without_a_name_goes_by_its_number() {
    let event = only(&old_stored(6, listed, |w| w.unsigned(5)));
    assert!(matches!(event.change, Change::Stored(StoredBlocks { lora: Some(lora), .. }) if lora == "5"));
}

#[test]
fn tokens_may_be_words_in_bytes() {
    let bytes: Vec<u8> = [1u32, 2, 300, 70_000].iter().flat_map(|token| token.to_le_bytes()).collect();
    let event = only(&old_stored(5, |w| w.raw(&bytes), |_| ()));
    assert!(matches!(event.change, Change::Stored(stored) if stored.tokens == [1, 2, 300, 70_000]));
    let odd = read(&old_stored(5, |w| w.raw(&bytes[1..]), |_| ())).unwrap_err();
    assert!(odd.message.contains("whole number of tokens"), "{odd}");
}

#[test]
fn removals_and_clears_of_older_engines_are_read() {
    let bytes = batch(4, |w| {
        w.array(2);
        w.text("BlockRemoved");
        w.array(1);
        w.raw(&[9; 32]);
        w.array(3);
        w.text("BlockRemoved");
        w.array(1);
        w.raw(&[0, 0, 0, 0, 0, 0, 0, 9]);
        w.text("GPU");
        w.array(1);
        w.text("AllBlocksCleared");
        w.array(2);
        w.text("BlockDreamt");
        w.unsigned(1);
    });
    let changes: Vec<Change> = read(&bytes).unwrap().events.into_iter().map(|e| e.change).collect();
    let removed = |hash, medium| Change::Removed(RemovedBlocks { hashes: vec![hash], medium, group: None });
    assert_eq!(
        changes,
        [
            removed(EngineHash::Full([9; 32]), None),
            removed(EngineHash::Word(9), Some(Medium::Gpu)),
            Change::Cleared(None),
            Change::Unknown("BlockDreamt".into()),
        ]
    );
}

#[test]
fn the_stores_own_publisher_may_know_the_object_only() {
    let store = |keys: &[(&str, &str)]| {
        batch(1, |w| {
            w.map(keys.len() + 1);
            w.text("event_id");
            w.unsigned(11);
            for (key, value) in keys {
                w.text(key);
                w.text(value);
            }
        })
    };
    let event = only(&store(&[("event_type", "stored"), ("medium", "cpu"), ("object_key", "m@group:0@ab")]));
    let source = Source { event_id: Some(11), object: Some("m@group:0@ab".into()), ..Source::default() };
    let stored = StoredBlocks { medium: Some(Medium::Cpu), ..StoredBlocks::default() };
    assert_eq!(event, Event { change: Change::Stored(stored), source: Some(Box::new(source)) });
    let both = only(&store(&[("type", "BlockDreamt"), ("event_type", "cleared")]));
    assert_eq!(both.change, Change::Cleared(None), "of two words for the kind the known one counts");
    let none = read(&store(&[("event_type", "removed")])).unwrap_err();
    assert!(none.message.contains("without its hashes"), "{none}");
    let typeless = read(&store(&[("medium", "cpu")])).unwrap_err();
    assert!(typeless.message.contains("without its type"), "{typeless}");
}

#[test]
fn a_time_is_in_seconds_or_in_milliseconds() {
    let at = |time: f64| {
        let mut writer = Writer::default();
        writer.array(2);
        writer.float(time);
        writer.array(0);
        read(&writer.finish()).unwrap().time_us
    };
    assert_eq!(
        (at(1_795_229_467.5), at(1_795_229_467_500.0)),
        (1_795_229_467_500_000, 1_795_229_467_500_000)
    );
    assert_eq!((at(-1.0), at(f64::NAN)), (0, 0), "what is no time is none");
}

#[test]
fn hashes_in_text_are_numbers() {
    let bytes = |text: &str| {
        batch(1, |w| {
            w.map(2);
            w.text("type");
            w.text("removed");
            w.text("seq_hashes");
            w.array(1);
            w.text(text);
        })
    };
    for (text, word) in [("12345678", 12_345_678), ("0x0123456789abcd", 0x0001_2345_6789_abcd)] {
        let Change::Removed(removed) = only(&bytes(text)).change else { panic!("removed was written") };
        assert_eq!(removed.hashes, [EngineHash::Word(word)]);
    }
    assert!(read(&bytes("no number")).unwrap_err().message.contains("neither a digest"));
}

#[test]
fn whatever_is_beyond_a_limit_is_refused_by_name() {
    let bytes = old_stored(5, listed, |_| ());
    let roomy = Limits::default();
    let refusal = |limits: Limits| decode(0, &bytes, &limits).unwrap_err().message;
    assert!(refusal(Limits { batch_bytes: 10, ..roomy }).contains("at most 10 are taken"));
    assert!(refusal(Limits { events: 0, ..roomy }).contains("1 events"));
    assert!(refusal(Limits { blocks: 1, ..roomy }).contains("more blocks"));
    assert!(refusal(Limits { tokens: 3, ..roomy }).contains("more tokens"));
    let salted = old_stored(7, listed, |w| {
        w.nil();
        w.text("a medium with a long name");
    });
    let refused = decode(0, &salted, &Limits { text_bytes: 8, ..roomy }).unwrap_err();
    assert!(refused.message.contains("25 bytes"), "{refused}");
}

#[test]
fn the_salt_that_sglang_tells_with_each_event_is_a_key_of_the_chains_first_block() {
    let told = |parent: Option<u64>| {
        let event = only(&batch(1, |w| {
            w.map(6);
            for (name, value) in [("type", "BlockStored"), ("cache_salt", "0f"), ("medium", "GPU")] {
                w.text(name);
                w.text(value);
            }
            for (name, value) in [("block_hashes", 7), ("token_ids", 3)] {
                w.text(name);
                w.array(1);
                w.unsigned(value);
            }
            w.text("parent_block_hash");
            match parent {
                Some(parent) => w.unsigned(parent),
                None => w.nil(),
            }
        }));
        let Change::Stored(stored) = event.change else { panic!("{event:?}") };
        stored.extra
    };
    let salt = ExtraKey::List(vec![ExtraKey::Text("cache_salt".into()), ExtraKey::Text("0f".into())]);
    assert_eq!(told(None), [BlockExtra { block: 0, keys: vec![salt] }]);
    assert_eq!(told(Some(6)), []);
}

#[test]
fn what_is_no_batch_is_refused() {
    for (bytes, why) in [
        (vec![], "cut off"),
        (vec![0x91, 1], "1 fields"),
        (vec![0x93, 1, 0x90], "3 items are announced"),
        (vec![0x92, 1, 0x91, 5], "neither map nor array"),
        (vec![0x92, 1, 0x91, 0x90], "without its type"),
        (vec![0x92, 0xa1, b'x', 0x90], "starts no integer"),
    ] {
        let error = read(&bytes).unwrap_err();
        assert!(error.message.contains(why), "{bytes:02x?}: {error}");
    }
    assert!(sequence_of(&[1, 2]).unwrap_err().message.contains("2 bytes"));
    assert_eq!(sequence_of(&[0, 0, 0, 0, 0, 0, 1, 0]), Ok(256));
}

#[test]
fn extra_keys_of_blocks_that_are_not_there_are_dropped() {
    let event = only(&old_stored(9, listed, |w| {
        (0..3).for_each(|_| w.nil());
        w.array(3);
        w.nil();
        w.nil();
        w.array(1);
        w.text("of a third block");
    }));
    let Change::Stored(stored) = event.change else { panic!("{event:?}") };
    assert_eq!((stored.hashes.len(), stored.extra), (2, vec![]));
}

#[test]
fn extra_keys_of_extra_keys_have_an_end() {
    let nested = |depth: usize| {
        old_stored(9, listed, |w| {
            w.nil();
            w.nil();
            w.nil();
            w.array(1);
            (0..depth).for_each(|_| w.array(1));
            w.text("picture");
        })
    };
    assert!(read(&nested(4)).is_ok());
    assert!(read(&nested(5)).unwrap_err().message.contains("extra key"));
}

fn any_hash() -> impl Strategy<Value = EngineHash> {
    prop_oneof![
        any::<u64>().prop_map(EngineHash::Word),
        any::<[u8; 16]>().prop_map(EngineHash::Half),
        any::<[u8; 32]>().prop_map(EngineHash::Full),
    ]
}

fn any_medium() -> impl Strategy<Value = Option<Medium>> {
    proptest::option::of(prop_oneof![
        Just(Medium::Gpu),
        Just(Medium::Cpu),
        Just(Medium::Disk),
        Just(Medium::Remote),
        Just(Medium::Other("tape".into())),
    ])
}

fn any_key() -> impl Strategy<Value = ExtraKey> {
    let leaf = prop_oneof![
        "[a-z]{0,9}".prop_map(ExtraKey::Text),
        vec(any::<u8>(), 0..9).prop_map(ExtraKey::Bytes),
        any::<u64>().prop_map(ExtraKey::Number),
    ];
    leaf.clone().prop_recursive(2, 4, 2, move |_| vec(leaf.clone(), 0..3).prop_map(ExtraKey::List))
}

prop_compose! {
    fn any_stored()(
        hashes in vec(any_hash(), 0..5), parent in proptest::option::of(any_hash()),
        tokens in vec(any::<u32>(), 0..20), medium in any_medium(), lora in proptest::option::of("[a-z]{1,5}"),
        keys in vec(vec(any_key(), 0..3), 5), base_block in proptest::option::of(any::<u64>()),
    ) -> StoredBlocks {
        let keyed = keys.into_iter().enumerate().take(hashes.len()).filter(|(_, keys)| !keys.is_empty());
        let extra = keyed.map(|(block, keys)| BlockExtra { block, keys }).collect();
        let attention = Some("full_attention".into());
        StoredBlocks {
            hashes, parent, base_block, tokens, block_tokens: 4, lora, medium, extra, group: Some(0), attention,
        }
    }
}

fn any_change() -> impl Strategy<Value = Change> {
    prop_oneof![
        any_stored().prop_map(Change::Stored),
        (vec(any_hash(), 0..5), any_medium()).prop_map(|(hashes, medium)| Change::Removed(RemovedBlocks {
            hashes,
            medium,
            group: Some(0)
        })),
        any_medium().prop_map(Change::Cleared),
    ]
}

fn any_batch() -> impl Strategy<Value = Batch> {
    (vec(any_change(), 0..6), any::<u32>(), proptest::option::of(0u32..9)).prop_map(
        |(changes, time_s, dp_rank)| Batch {
            sequence: 9,
            time_us: u64::from(time_s) * 1_000_000,
            dp_rank,
            events: changes.into_iter().map(Event::from).collect(),
        },
    )
}

proptest! {
    #[test]
    fn the_vllm_form_comes_back_as_it_was(mut batch in any_batch()) {
        for event in &mut batch.events {
            if let Change::Stored(stored) = &mut event.change {
                stored.base_block = None;
            }
        }
        let bytes = encode(&batch, Form::Vllm, &Speaker::default());
        prop_assert_eq!(decode(9, &bytes, &Limits::default()), Ok(batch));
    }

    #[test]
    fn the_standard_form_comes_back_with_who_spoke(batch in any_batch()) {
        let speaker = Speaker { model: "m".into(), block_tokens: 4, backend: "b".into(), ..Speaker::default() };
        let bytes = encode(&batch, Form::Standard, &speaker);
        let mut back = decode(9, &bytes, &Limits::default()).unwrap();
        for (place, (event, sent)) in back.events.iter_mut().zip(&batch.events).enumerate() {
            let source = event.source.take().unwrap();
            prop_assert_eq!(source.event_id, Some((9 << 20) + place as u64));
            prop_assert_eq!(source.time_ms, Some(batch.time_us / 1000));
            prop_assert_eq!((source.model.as_deref(), source.backend.as_deref()), (Some("m"), Some("b")));
            prop_assert_eq!((source.tenant.as_deref(), source.salt), (Some("default"), None));
            let mut sent = sent.change.clone();
            match &mut sent {
                Change::Stored(stored) => (stored.group, stored.attention) = (None, None),
                Change::Removed(removed) => removed.group = None,
                _ => {}
            }
            prop_assert_eq!(&event.change, &sent);
        }
        prop_assert_eq!(back.events.len(), batch.events.len());
    }

    #[test]
    fn no_bytes_make_it_panic(bytes in vec(any::<u8>(), 0..300)) {
        let _ = read(&bytes);
    }

    #[test]
    fn no_damage_to_a_batch_makes_it_panic(
        batch in any_batch(), at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<prop::sample::Index>(),
        standard in any::<bool>(),
    ) {
        let form = if standard { Form::Standard } else { Form::Vllm };
        let whole = encode(&batch, form, &Speaker::default());
        prop_assert!(read(&whole[..cut.index(whole.len())]).is_err(), "what is cut off is not taken for whole");
        let mut damaged = whole;
        let place = at.index(damaged.len());
        damaged[place] = byte;
        let _ = read(&damaged);
    }
}
