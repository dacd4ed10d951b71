//! The bodies of calls, and their shapes.

use super::model::{MountedSegment, OBJECT, PLACING, PlacementOptions, SEGMENT, UUID, Uuid};
use crate::pack::{Shape, pack};

/// The keepers of each object, for callers without an identity.
const TENANT: &str = "default";
/// All kinds of replicas.
const ALL_REPLICAS: i32 = 4;

pub(super) const MOUNT: Shape = Shape::Struct(&[SEGMENT, UUID]);
pub(super) const REMOUNT: Shape = Shape::Struct(&[Shape::List(&SEGMENT), UUID]);
pub(super) const UNMOUNT: Shape = Shape::Struct(&[UUID, UUID]);
pub(super) const KEY: Shape = Shape::Struct(&[Shape::Text, Shape::Text]);
pub(super) const REMOVE: Shape = Shape::Struct(&[Shape::Text, Shape::Bool, Shape::Text]);
pub(super) const PUT_START: Shape = Shape::Struct(&[UUID, Shape::Text, Shape::U64, PLACING, Shape::Text]);
pub(super) const PUT_END: Shape = Shape::Struct(&[UUID, OBJECT, Shape::I32, Shape::Text]);
pub(super) const PUT_REVOKE: Shape = Shape::Struct(&[UUID, Shape::Text, Shape::I32, Shape::Text]);

pub(super) fn mount(client: Uuid, segment: &MountedSegment) -> Vec<u8> {
    pack(&MOUNT, |to| {
        segment.write(to);
        client.write(to);
    })
}

pub(super) fn remount(client: Uuid, segment: &MountedSegment) -> Vec<u8> {
    pack(&REMOUNT, |to| {
        to.length(1);
        segment.write(to);
        client.write(to);
    })
}

pub(super) fn unmount(client: Uuid, segment: Uuid) -> Vec<u8> {
    pack(&UNMOUNT, |to| {
        segment.write(to);
        client.write(to);
    })
}

pub(super) fn ping(client: Uuid) -> Vec<u8> {
    pack(&UUID, |to| client.write(to))
}

pub(super) fn key(key: &str) -> Vec<u8> {
    pack(&KEY, |to| {
        to.text(key);
        to.text(TENANT);
    })
}

pub(super) fn remove(key: &str, force: bool) -> Vec<u8> {
    pack(&REMOVE, |to| {
        to.text(key);
        to.bool(force);
        to.text(TENANT);
    })
}

pub(super) fn put_start(client: Uuid, key: &str, bytes: u64, placing: &PlacementOptions) -> Vec<u8> {
    pack(&PUT_START, |to| {
        client.write(to);
        to.text(key);
        to.u64(bytes);
        placing.write(to);
        to.text(TENANT);
    })
}

pub(super) fn put_end(client: Uuid, key: &str, checksum: Option<u64>) -> Vec<u8> {
    pack(&PUT_END, |to| {
        client.write(to);
        to.text(key);
        to.optional(checksum.as_ref(), |to, sum| to.u64(*sum));
        to.i32(ALL_REPLICAS);
        to.text(TENANT);
    })
}

pub(super) fn put_revoke(client: Uuid, key: &str) -> Vec<u8> {
    pack(&PUT_REVOKE, |to| {
        client.write(to);
        to.text(key);
        to.i32(ALL_REPLICAS);
        to.text(TENANT);
    })
}
