//go:build unfenced

package fencing

const unfencedBuild = true
