//go:build unfenced

package bus

const unfencedBuild = true
